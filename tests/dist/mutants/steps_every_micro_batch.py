"""The optimizer steps once per micro-batch, each time with a share of the gradient."""

from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.verify import worker

step = ShardOptimizer.step


def step_often(self, *, factor):
    for _ in range(3):
        step(self, factor=1.0)
    return step(self, factor=factor)


def main(path: str, *digests: str) -> int:
    ShardOptimizer.step = step_often
    return worker.main(path, *digests)
