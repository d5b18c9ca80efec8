"""The head's gradient is a tenth too large."""

from colotrain.engine.step import train
from colotrain.verify import worker

update = train.update_


def update_(run):
    run.sharded.module.head.weight.grad.mul_(1.1)
    return update(run)


def main(path: str) -> int:
    train.update_ = update_
    return worker.main(path)
