"""Page-locked memory of exactly the size that is asked for, in huge pages.

torch's own allocator rounds up to a power of two: 128 GiB for a 7B model's 75 GiB of state. And
CUDA locks memory that was never written page by page on one thread, a minute for 58 GiB.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.offload.disk import whole_pages

NOT_SUPPORTED = 801
"""`cudaErrorNotSupported` of CUDA's `driver_types.h`, as some virtual machines answer."""

_to_be_told: list[Callable[[str], None]] = []


def tell_once(tell: Callable[[str], None]) -> None:
    """Have `tell` called with the first refusal to page-lock memory from here on."""
    _to_be_told[:] = [tell]


class Pages(mmap.mmap):
    """Anonymous memory, in huge pages where the system has them, that takes room once written."""

    unlock: Callable[[], object] | None = None
    """Called before the memory is unmapped; a weak reference's callback would come after."""

    @classmethod
    def allocate(cls, num_bytes: int) -> Pages:
        """Map at least one page."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = cls(-1, whole_pages(max(1, num_bytes)), flags=flags)
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def tensor(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes`, at least one, as a tensor that keeps the memory."""
        return torch.frombuffer(self, dtype=torch.uint8, count=max(1, num_bytes))

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def page_locked(num_bytes: int) -> Tensor:
    """Return `num_bytes` of page-locked host memory, as bytes.

    Where CUDA refuses, the memory is not locked: copies are right, but the host waits for them.
    """
    pages = Pages.allocate(num_bytes)
    memory = pages.tensor(len(pages)).zero_()  # on all of this rank's cores
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, len(pages), 0)) if runtime else NOT_SUPPORTED
    if code == 0:
        pages.unlock = partial(_unlock, runtime, address, torch.cuda.current_device())
        return pages.tensor(num_bytes)
    with suppress(RuntimeError, AssertionError):  # a launch reads CUDA's last error, the refusal
        torch.ones(1, device="cuda")
    if code == NOT_SUPPORTED:
        pages.madvise(mmap.MADV_DONTNEED)  # frees them, for torch allocates others
        with suppress(RuntimeError):
            return torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=True)
    while _to_be_told:
        text = f"CUDA does not page-lock {len(pages):,} bytes of host memory (error {code})"
        _to_be_told.pop()(f"{text}: training waits for its copies; try `ulimit -l unlimited`")
    return pages.tensor(num_bytes)


def _unlock(runtime: Any, address: int, device: int) -> None:
    """Let the pages go once no copy from or to them is under way; a process that ends may fail."""
    with suppress(RuntimeError, AssertionError):
        torch.cuda.synchronize(device)
    runtime.cudaHostUnregister(address)
