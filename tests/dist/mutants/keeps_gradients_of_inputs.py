"""Each rank keeps the part of an input's gradient that comes through its own part of a matrix."""

from colotrain.models import tensor_parallel
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    tensor_parallel._Enter.backward = staticmethod(lambda ctx, grad: (grad, None))
    return worker.main(path, *digests)
