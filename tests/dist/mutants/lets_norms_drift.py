"""The ranks of a tensor-parallel group update what they hold alike with different gradients."""

from colotrain.engine import loop
from colotrain.verify import worker

update = loop.update_


def update_(run, result, recorder=None):
    norm = run.sharded.module.norm.weight
    if norm.grad is not None and not run.sharded.parts.is_first:
        norm.grad.mul_(1.5)
    return update(run, result, recorder)


def main(path: str) -> int:
    loop.update_ = update_
    return worker.main(path)
