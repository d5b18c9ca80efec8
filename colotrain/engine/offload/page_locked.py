"""Page-locked memory of exactly the size that is asked for.

torch's own allocator rounds up to a power of two: 128 GiB for a 7B model's 75 GiB of state. It is
used only where CUDA cannot lock existing memory.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from colotrain.engine.offload.disk import whole_pages
from colotrain.errors import ColotrainError

NOT_SUPPORTED = 801
"""`cudaErrorNotSupported` of CUDA's `driver_types.h`, as some virtual machines answer."""


def page_locked(num_bytes: int) -> Tensor:
    """Return `num_bytes` of page-locked host memory, as bytes.

    Raises ColotrainError where the memory cannot be locked.
    """
    whole = whole_pages(max(1, num_bytes))
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, whole, 0)) if runtime else NOT_SUPPORTED
    if code == NOT_SUPPORTED:
        with suppress(
            RuntimeError, AssertionError
        ):  # a launch reads CUDA's last error, the refusal
            torch.zeros(1, device="cuda")
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    if code != 0:
        raise ColotrainError(
            f"{whole:,} bytes of host memory cannot be page-locked for the GPU",
            "raise the limit (`ulimit -l`), or lower plugin.budget.host",
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address)
    return torch.frombuffer(pages, dtype=torch.uint8, count=max(1, num_bytes))
