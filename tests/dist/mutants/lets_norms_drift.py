"""The ranks of a tensor-parallel group update what they hold alike with different gradients."""

from colotrain.engine.step import train
from colotrain.spec.axes import TP
from colotrain.verify import worker

agree = train.agree


def agree_on_others(run, *others):
    norm = run.sharded.module.norm.weight
    if norm.grad is not None and not run.plan.ranks.is_first(run.rank, TP):
        norm.grad.mul_(1.5)
    return agree(run, *others)


def main(path: str, *digests: str) -> int:
    train.agree = agree_on_others
    return worker.main(path, *digests)
