"""Every step begins with empty optimizer state."""

from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.verify import worker

step = ShardOptimizer.step


def step_anew(self, *, factor):
    self.forget_state_(self.parameters)
    return step(self, factor=factor)


def main(path: str, *digests: str) -> int:
    ShardOptimizer.step = step_anew
    return worker.main(path, *digests)
