"""One block of a packed layer begins with a scale that is a thousandth larger."""

import torch

from colotrain.engine.build import transforms as training
from colotrain.engine.parts.part_map import local_part
from colotrain.verify import worker

materialise_ = training.materialise_


def materialise_otherwise_(sharded, **options):
    materialise_(sharded, **options)
    scales = local_part(dict(sharded.module.named_parameters())["blocks.1.mlp.up.absmax"])
    with torch.no_grad():
        scales[:1].view(torch.float32).mul_(1.001)


def main(path: str, *digests: str) -> int:
    training.materialise_ = materialise_otherwise_
    return worker.main(path, *digests)
