"""The gradients of experts are divided by the ranks that divide them."""

from colotrain.engine.gradients import accumulation
from colotrain.engine.parts.part_map import local_part
from colotrain.spec.axes import EP
from colotrain.verify import worker

sum_partial_ = accumulation.sum_partial_


def sum_and_average_(sharded):
    sum_partial_(sharded)
    for name, parameter in sharded.trained().items():
        if EP in sharded.parts[name].divided and parameter.grad is not None:
            local_part(parameter.grad).div_(sharded.comms.ranks.size(EP))
            sharded.norms.pop(name, None)


def main(path: str, *digests: str) -> int:
    accumulation.sum_partial_ = sum_and_average_
    return worker.main(path, *digests)
