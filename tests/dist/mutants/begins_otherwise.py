"""The model's last parameter begins with values that are a hundred thousandth larger."""

import torch

from colotrain.engine.build import transforms as training
from colotrain.verify import worker

materialise_ = training.materialise_


def materialise_otherwise_(sharded, **options):
    materialise_(sharded, **options)
    with torch.no_grad():
        list(sharded.module.parameters())[-1].mul_(1.00001)


def main(path: str, *digests: str) -> int:
    training.materialise_ = materialise_otherwise_
    return worker.main(path, *digests)
