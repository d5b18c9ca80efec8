"""Each rank of a tensor-parallel group keeps the gradient that norms get from its own tokens."""

from colotrain.engine.gradients import accumulation
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    accumulation.sum_partial_ = lambda sharded: None
    return worker.main(path, *digests)
