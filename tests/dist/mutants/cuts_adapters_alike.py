"""Each rank of a tensor-parallel group begins with values drawn for its part of an adapter."""

import torch

from colotrain.engine.parts import wholes
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    own_part = wholes.own_part

    def own(part, whole):  # type: ignore[no-untyped-def]
        dim = part.divided.get("tp")
        if ".lora_" in part.name and dim is not None:
            size = whole.shape[dim] // 2
            part_of_first = whole.narrow(dim, 0, size)
            whole = torch.cat([part_of_first, part_of_first], dim)
        return own_part(part, whole)

    wholes.own_part = own
    return worker.main(path, *digests)
