"""The bytes of a tensor where they lie."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; of one that is not contiguous, those of a copy.

    The tensor stays alive as long as the view. `Tensor.numpy` would do the same, but torch then
    refuses to resize the storage ever again, as FSDP does with whole parameters.
    """
    flat = tensor.detach().contiguous()
    if not flat.numel():
        return memoryview(b"")
    array = (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    array.tensor = flat  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
