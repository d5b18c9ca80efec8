"""Access to a tensor's bytes without a copy."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor; a tensor that is not contiguous is copied first.

    The view keeps the tensor alive. `Tensor.numpy` would do the same, but torch then never lets the
    storage be resized again, and FSDP must resize that of whole parameters.
    """
    flat = tensor.detach().contiguous()
    if not flat.numel():
        return memoryview(b"")
    array = (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    array.tensor = flat  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
