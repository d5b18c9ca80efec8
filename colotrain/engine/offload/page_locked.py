"""Page-locked memory of exactly the size that is asked for.

torch's own allocator rounds up to a power of two: 128 GiB for a 7B model's 75 GiB of state. It is
used only where CUDA cannot lock existing memory.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from colotrain.engine.offload.disk import aligned, whole_pages
from colotrain.errors import ColotrainError

NOT_SUPPORTED = 801
"""`cudaErrorNotSupported` of CUDA's `driver_types.h`, as some virtual machines answer."""


def page_locked(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return flat tensors of `sizes` elements in page-locked host memory, in one block if possible.

    Raises ColotrainError where the memory cannot be locked.
    """
    each = list(zip(sizes, dtypes, strict=True))
    num_bytes = whole_pages(max(1, sum(aligned(n * d.itemsize) for n, d in each)))
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, num_bytes, 0)) if runtime else NOT_SUPPORTED
    if code == NOT_SUPPORTED:
        with suppress(
            RuntimeError, AssertionError
        ):  # a launch reads CUDA's last error, the refusal
            torch.zeros(1, device="cuda")
        return [torch.empty(size, dtype=dtype, pin_memory=True) for size, dtype in each]
    if code != 0:
        raise ColotrainError(
            f"plugin.budget.host: {num_bytes:,} bytes cannot be page-locked for the GPU",
            "raise the limit (`ulimit -l`), or lower plugin.budget.host",
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address)
    tensors, offset = [], 0
    for size, dtype in each:
        tensors.append(
            torch.frombuffer(pages, dtype=dtype, count=size, offset=offset)
            if size
            else torch.empty(0, dtype=dtype)
        )
        offset += aligned(size * dtype.itemsize)
    return tensors
