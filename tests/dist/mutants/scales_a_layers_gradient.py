"""The first layer's gradient is a tenth too large."""

from colotrain.engine.step import train
from colotrain.verify import worker

agree = train.agree


def agree_on_more(run, *others):
    run.sharded.module.layers[0].linear.weight.grad.mul_(1.1)
    return agree(run, *others)


def main(path: str, *digests: str) -> int:
    train.agree = agree_on_more
    return worker.main(path, *digests)
