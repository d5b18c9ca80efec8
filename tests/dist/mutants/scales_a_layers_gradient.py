"""The first layer's gradient is a tenth too large."""

from colotrain.engine import loop
from colotrain.verify import worker

update = loop.update_


def update_(run, result, recorder=None):
    run.sharded.module.layers[0].linear.weight.grad.mul_(1.1)
    return update(run, result, recorder)


def main(path: str) -> int:
    loop.update_ = update_
    return worker.main(path)
