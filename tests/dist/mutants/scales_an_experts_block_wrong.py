"""One block of a layer's packed experts begins with twice its scale."""

import torch

from colotrain.engine.build import transforms as training
from colotrain.engine.parts.part_map import local_part
from colotrain.verify import worker

materialise_ = training.materialise_


def materialise_otherwise_(sharded, **options):
    materialise_(sharded, **options)
    held = dict(sharded.module.named_parameters())
    scales = local_part(held["model.layers.1.mlp.experts.down_proj_absmax"])
    with torch.no_grad():
        scales[:1] += 1


def main(path: str, *digests: str) -> int:
    training.materialise_ = materialise_otherwise_
    return worker.main(path, *digests)
