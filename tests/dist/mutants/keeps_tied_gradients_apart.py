"""The first and the last stage keep their own gradients of the parameter that they share."""

from colotrain.engine.gradients import accumulation
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    accumulation.sum_tied_ = lambda sharded: None
    return worker.main(path, *digests)
