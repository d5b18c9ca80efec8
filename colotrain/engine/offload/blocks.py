"""The memory below a GPU of one group's tensors of one kind, copied as a whole in one call.

On the host the memory is page-locked, so that a copy runs beside training. Pages of a file cannot
be, so what is on disk passes through a window: page-locked memory as large as the largest block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colotrain.engine.offload.disk import Region, aligned
from colotrain.engine.offload.page_locked import page_locked


@dataclass(slots=True, kw_only=True)
class Block:
    """Bytes of one kind of a group's tensors, one after the other."""

    memory: Tensor
    """Bytes that are page-locked, or mapped from a file."""
    sizes: Sequence[int]
    """Elements of each tensor."""
    dtypes: Sequence[torch.dtype]
    region: Region | None
    """Where the memory is mapped; None for page-locked memory."""

    def views(self, flat: Tensor | None = None) -> list[Tensor]:
        """Return the tensors, themselves flat, in the memory or in its copy `flat`."""
        flat = self.memory if flat is None else flat
        found, start = [], 0
        for size, dtype in zip(self.sizes, self.dtypes, strict=True):
            num_bytes = size * dtype.itemsize
            found.append(flat[start : start + num_bytes].view(dtype))
            start += aligned(num_bytes)
        return found


def num_bytes_of(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes of a block with tensors of `sizes` elements."""
    each = zip(sizes, dtypes, strict=True)
    return max(1, sum(aligned(size * dtype.itemsize) for size, dtype in each))


def allocate(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], region: Region | None = None
) -> Block:
    """Return a block in `region`, or in page-locked memory of its own."""
    num_bytes = num_bytes_of(sizes, dtypes)
    memory = page_locked(num_bytes) if region is None else region.memory()[:num_bytes]
    return Block(memory=memory, sizes=sizes, dtypes=dtypes, region=region)


class Window:
    """Page-locked memory through which blocks on disk pass, one at a time.

    The host waits for the GPU here: only the host can read and write the pages of a file, and only
    before it has read them or after they have arrived.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        """Event after the last copy from or to the window, until the host has waited for it."""
        self.arriving: Block | None = None
        """Block whose bytes the last copy brings to the window."""

    def to_device(self, block: Block) -> Tensor:
        """Return a copy of `block` on the GPU, made by the current stream."""
        memory = block.memory
        if block.region is not None:
            memory = self._free(len(block.memory))
            memory.copy_(block.memory)
        found = memory.to("cuda", non_blocking=True)
        if block.region is not None:
            self.copied = torch.cuda.current_stream().record_event()
        return found

    def to_host(self, block: Block, flat: Tensor) -> None:
        """Copy `flat`, a copy of `block` on the GPU, back by the current stream."""
        memory = block.memory if block.region is None else self._free(len(block.memory))
        memory.copy_(flat, non_blocking=True)
        if block.region is not None:
            self.copied, self.arriving = torch.cuda.current_stream().record_event(), block

    def finish(self) -> None:
        """Wait for the last copy, and write what it brought to its pages."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.arriving is not None:
            assert self.memory is not None
            self.arriving.memory.copy_(self.memory[: len(self.arriving.memory)])
        self.copied = self.arriving = None

    def _free(self, num_bytes: int) -> Tensor:
        self.finish()
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = page_locked(num_bytes)
        return self.memory[:num_bytes]
