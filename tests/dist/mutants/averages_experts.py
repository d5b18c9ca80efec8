"""The gradients of experts are divided by the ranks that divide them."""

from colotrain.engine.gradients import accumulation
from colotrain.engine.parts.part_map import local_part
from colotrain.verify import worker

sum_partial_ = accumulation.sum_partial_


def sum_and_average_(sharded):
    sum_partial_(sharded)
    for name, parameter in sharded.trained().items():
        if name in sharded.tensor.splits and parameter.grad is not None:
            local_part(parameter.grad).div_(sharded.tensor.shard.size)
            sharded.norms.pop(name, None)


def main(path: str, *digests: str) -> int:
    accumulation.sum_partial_ = sum_and_average_
    return worker.main(path, *digests)
