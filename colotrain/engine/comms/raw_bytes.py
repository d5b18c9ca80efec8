"""Access to a tensor's bytes without a copy, and their checksum."""

from __future__ import annotations

import ctypes

import torch
import xxhash
from torch import Tensor

PIECE = 1 << 22
"""Numbers of 8 bytes that are summed at once."""


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


def checksum(tensor: Tensor) -> int:
    """Return a number that any flipped bit changes, and (almost surely) any change of order.

    On the CPU it is a hash; elsewhere the sum of the bits as integers, each times its own odd
    number.
    """
    if tensor.device.type == "cpu":
        return int(xxhash.xxh3_64_intdigest(bytes_of(tensor))) - (1 << 63)
    return sum_of_bits(tensor.detach().contiguous().view(-1).view(torch.uint8))


def sum_of_bits(flat: Tensor) -> int:
    """Return the checksum of bytes that are not on the CPU."""
    if flat.storage_offset() % 8:  # a view at an offset that int64 does not allow
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    total = flat[whole:].sum(dtype=torch.int64)
    for start, piece in enumerate(flat[:whole].view(torch.int64).split(PIECE)):
        first = 2 * start * PIECE + 1
        odd = torch.arange(first, first + 2 * piece.numel(), 2, device=flat.device)
        total = total + (piece * odd).sum()
    return int(total.item())
