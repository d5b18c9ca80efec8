"""The blocks of two experts are swapped where backward unpacks them again."""

from colotrain.models.quantized import experts
from colotrain.verify import worker

view = experts._Stack.view


def view_of_swapped(stack, size, stride, offset):
    found = view(stack, size, stride, offset)
    return found[[1, 0, *range(2, len(found))]] if len(size) == 3 else found


def main(path: str, *digests: str) -> int:
    experts._Stack.view = view_of_swapped
    return worker.main(path, *digests)
