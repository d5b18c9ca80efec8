"""Every rank counts the positions of its own part from 0."""

import torch

from colotrain.models import llm
from colotrain.verify import worker

tables = llm.rotary_tables


def restarting(positions, *others):
    return tables(torch.arange(positions.shape[-1]).expand_as(positions), *others)


def main(path: str, *digests: str) -> int:
    llm.rotary_tables = restarting
    return worker.main(path, *digests)
