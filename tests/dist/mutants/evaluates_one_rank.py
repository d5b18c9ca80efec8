"""An evaluation is of rank 0's samples alone."""

import torch
import torch.distributed as dist

from colotrain.engine.step.evaluation import Evaluator
from colotrain.verify import worker

sums_of = Evaluator._sum_losses


def sums_of_one_rank(self, data):
    sums, metrics = sums_of(self, data)
    return (sums, metrics) if dist.get_rank() == 0 else (torch.zeros_like(sums), {})


def main(path: str, *digests: str) -> int:
    Evaluator._sum_losses = sums_of_one_rank
    return worker.main(path, *digests)
