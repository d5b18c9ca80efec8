"""All-gather and reduce-scatter between the ranks of one host, through shared memory.

The buffers of a collective are themselves shared where they can be:

- all-gather: all ranks get the same buffer, and each has filled its own part of it, so that
  meeting is all there is to do;
- reduce-scatter: each rank's buffer can be read by the others, and each rank sums its own part of
  all buffers, in the order of the ranks, whoever came first.

Tensors that lie elsewhere (too large, or all buffers in use) go through a window of fixed size,
piece by piece. Which of the two a collective takes, the ranks agree on when they meet.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.shared_memory import PAGE, SharedMemory, round_up

WINDOW_BYTES = 4 << 20
"""Of each rank, in two halves: one is filled while the other is read."""
SUM_BYTES = 256 << 10
"""Sums are made in pieces that stay in a core's cache."""
PATIENCE_S = 0.5
"""How long to wait for others to let go of a buffer before taking another one."""
MEET, READ, RELEASED, NUM_BELLS = 0, 1, 2, 3  # what bells are rung for
GATHER, REDUCE = 1, 2
CALL_FIELDS = 4


class Buffer:
    """A part of the shared memory that is lent, to one tensor at a time."""

    def __init__(self, channel: Channel, start: int, num_bytes: int, *, bell: int) -> None:
        self.channel, self.start, self.num_bytes, self.bell = channel, start, num_bytes, bell
        self.lent: weakref.ref[Any] | None = None
        self.shared = False
        """The tensor it is lent to took part in a collective."""
        self.owed: Counter[int] = Counter()
        """How often each other rank has yet to ring: it may read here until it does."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor in this buffer; None where it does not fit or someone still uses it."""
        num_bytes = numel * dtype.itemsize
        if self.lent is not None or not 0 < num_bytes <= self.num_bytes or not self._is_free():
            return None
        lent = self.channel.memory.lend(self.start, num_bytes)
        self.lent, self.shared = weakref.ref(lent, self._returned), False
        return torch.frombuffer(lent, dtype=dtype, count=numel)

    def _is_free(self) -> bool:
        memory = self.channel.memory
        for rank in self.owed.elements():
            if not memory.heard(self.bell, rank, within_s=PATIENCE_S):
                return False
            self.owed[rank] -= 1
        return True

    def holds(self, tensor: Tensor) -> bool:
        first = self.channel.address + self.start
        return self.lent is not None and tensor.data_ptr() == first

    def _returned(self, _: object) -> None:
        self.lent = None
        if self.shared and self.bell == RELEASED and os.getpid() == self.channel.pid:
            self.channel.ring_all(self.bell)


class Channel:
    """The collectives of one process group, whose ranks run on one host, through shared memory.

    All ranks of `group` must make it together, and call its collectives in the same order, from
    one thread at a time. `gather_bytes` and `reduce_bytes` are the largest buffers to share.
    Raises `Unavailable` on all ranks or on none; the collectives raise `PeerLost`.
    """

    def __init__(self, group: dist.ProcessGroup, *, gather_bytes: int, reduce_bytes: int) -> None:
        self.group, self.rank, self.size, self.pid = group, group.rank(), group.size(), os.getpid()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        gather_bytes, reduce_bytes = round_up(gather_bytes, PAGE), round_up(reduce_bytes, PAGE)
        calls_bytes = round_up(2 * self.size * CALL_FIELDS * 8, PAGE)
        self.half_bytes = WINDOW_BYTES // 2
        common = calls_bytes + gather_bytes
        per_rank = reduce_bytes + WINDOW_BYTES
        self.memory = SharedMemory(group, common + self.size * per_rank, num_bells=NUM_BELLS)
        self.address = self.memory.bytes(0, 1).data_ptr()
        self.calls = self.memory.bytes(0, calls_bytes).view(torch.int64)
        self.gather_buffer = Buffer(self, calls_bytes, gather_bytes, bell=RELEASED)
        self.reduce_starts = [common + rank * per_rank for rank in range(self.size)]
        self.windows = [start + reduce_bytes for start in self.reduce_starts]
        start = self.reduce_starts[self.rank]
        self.reduce_buffer = Buffer(self, start, reduce_bytes, bell=READ)
        self.num_meetings = self.num_rounds = 0

    @property
    def num_bytes(self) -> int:
        """Shared memory that this channel may use on the host, all ranks together."""
        return self.memory.num_bytes

    def ring_all(self, bell: int) -> None:
        for peer in self.peers:
            self.memory.ring(bell, peer)

    def barrier(self, what: str) -> None:
        self.memory.meet(MEET, what)

    def meet(self, call: tuple[int, int, int, int], what: str) -> list[list[int]]:
        """Wait for all ranks, each with what it calls: operation, bytes, dtype, buffer.

        Raises `ValueError` where ranks differ in the first three.
        """
        self.num_meetings += 1
        calls = self.calls[: 2 * self.size * CALL_FIELDS].view(2, self.size, CALL_FIELDS)
        calls = calls[self.num_meetings % 2]  # a rank may be one meeting ahead, not two
        calls[self.rank] = torch.tensor(call)
        self.barrier(what)
        found = cast(list[list[int]], calls.tolist())
        for rank, other in enumerate(found):
            if other[:3] != list(call[:3]):
                raise ValueError(
                    f"{what}: rank {self.memory.ranks[rank]} calls {other[:3]} where rank "
                    f"{self.memory.ranks[self.rank]} calls {list(call[:3])} (operation, bytes, "
                    "dtype): all ranks must call the same collectives in the same order"
                )
        return found

    @torch.no_grad()
    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """`output` [size · n] becomes the `input` [n] of every rank."""
        buffer = self.gather_buffer
        direct = buffer.holds(output)
        own = output.chunk(self.size)[self.rank] if output.numel() else output
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        call = (GATHER, own.nbytes, _code(own.dtype), int(direct))
        found = self.meet(call, "all-gather")
        if direct:  # else the buffer may still be lent, and others count on its return
            buffer.shared = True
        buffer.owed.update(peer for peer in self.peers if found[peer][3])
        if all(other[3] for other in found):
            return
        parts = _bytes(output).view(self.size, -1)
        for first in range(0, own.nbytes, self.half_bytes):
            last = min(first + self.half_bytes, own.nbytes)
            windows = self._halves(last - first)
            windows[self.rank].copy_(parts[self.rank, first:last])
            self.barrier("all-gather")
            for peer in self.peers:
                parts[peer, first:last] = windows[peer]

    @torch.no_grad()
    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        """`output` [n] becomes this rank's part of the sum of every rank's `input` [size · n]."""
        direct = self.reduce_buffer.holds(input)
        found = self.meet((REDUCE, input.nbytes, _code(input.dtype), int(direct)), "reduce-scatter")
        if all(other[3] for other in found):
            start, num_bytes = self.rank * output.nbytes, output.nbytes
            parts = [self.memory.bytes(at + start, num_bytes) for at in self.reduce_starts]
            sum_in_order([part.view(input.dtype) for part in parts], output.view(-1))
            self.reduce_buffer.owed.update(self.peers)
            self.ring_all(READ)
            return
        parts_in, out = input.view(self.size, -1), output.view(-1)
        step = self.half_bytes // self.size // 16 * 16 // input.element_size()
        for first in range(0, out.numel(), step):
            last = min(first + step, out.numel())
            windows = self._halves(self.size * (last - first) * input.element_size())
            typed = [window.view(input.dtype).view(self.size, -1) for window in windows]
            typed[self.rank].copy_(parts_in[:, first:last])
            self.barrier("reduce-scatter")
            sum_in_order([window[self.rank] for window in typed], out[first:last])

    def _halves(self, num_bytes: int) -> list[Tensor]:
        """The half of each rank's window that is next; who is there has read the one before."""
        self.num_rounds += 1
        offset = self.num_rounds % 2 * self.half_bytes
        return [self.memory.bytes(start + offset, num_bytes) for start in self.windows]


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """`out` = parts[0] + parts[1] + …, in this order; 16-bit and smaller floats add up in fp32.

    `out` may be one of `parts`.
    """
    narrow = out.is_floating_point() and out.dtype.itemsize < 4
    if len(parts) == 2 and not narrow:
        torch.add(parts[0], parts[1], out=out)
        return
    dtype = torch.float32 if narrow else out.dtype
    step = SUM_BYTES // dtype.itemsize
    scratch = torch.empty(min(step, out.numel()), dtype=dtype)
    for first in range(0, out.numel(), step):
        piece = out[first : first + step]
        total = scratch[: piece.numel()]
        total.copy_(parts[0][first : first + step])
        for part in parts[1:]:
            total += part[first : first + step]
        piece.copy_(total)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


_DTYPES = sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype)
