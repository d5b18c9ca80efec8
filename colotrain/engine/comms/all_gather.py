"""All-gather and reduce-scatter between the ranks of one host, through shared memory.

Where possible the output buffer of an all-gather is itself shared memory, the same on all ranks:
each rank has filled its own part before the call, so the all-gather is only a barrier. Other
outputs (too large, or made while the buffer is in use) are copied piece by piece through windows of
fixed size. Which of the two a call uses, the ranks agree on at its barrier.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.shared_memory import PAGE, SharedMemory, round_up
from colotrain.spec.cpu_memory import WINDOW_BYTES

PATIENCE_S = 0.5
"""Seconds to wait until other ranks have released a buffer, before using ordinary memory."""
BARRIER, RELEASED, NUM_SEMAPHORES = 0, 1, 2  # what the semaphores count
CALL_FIELDS = 3


class Buffer:
    """The part of the shared memory that holds outputs of all-gathers, one tensor at a time."""

    def __init__(self, channel: Channel, start: int, num_bytes: int) -> None:
        self.channel, self.start, self.num_bytes = channel, start, num_bytes
        self.in_use: weakref.ref[Any] | None = None
        self.shared = False
        """Whether the tensor that uses the buffer took part in a collective."""
        self.owed: Counter[int] = Counter()
        """Rank → how often it has yet to post RELEASED; until then it may still read the buffer."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor in this buffer; None where it does not fit or the buffer is in use."""
        num_bytes = numel * dtype.itemsize
        if self.in_use is not None or not 0 < num_bytes <= self.num_bytes or not self._is_free():
            return None
        view = self.channel.memory.buffer_at(self.start, num_bytes)
        self.in_use, self.shared = weakref.ref(view, self._released), False
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def _is_free(self) -> bool:
        memory = self.channel.memory
        for rank in self.owed.elements():
            if not memory.try_wait(RELEASED, rank, within_s=PATIENCE_S):
                return False
            self.owed[rank] -= 1
        return True

    def holds(self, tensor: Tensor) -> bool:
        first = self.channel.address + self.start
        return self.in_use is not None and tensor.data_ptr() == first

    def _released(self, _: object) -> None:
        self.in_use = None
        if self.shared and os.getpid() == self.channel.pid:
            for peer in self.channel.peers:
                self.channel.memory.post(RELEASED, peer)


class Channel:
    """All-gathers through shared memory, for a process group whose ranks run on one host.

    All ranks of `group` must create it together and call its all-gathers in the same order, from
    one thread at a time. `buffer_bytes` is the largest output that lies in shared memory. Raises
    `Unavailable` on all ranks or on none; the all-gathers raise `PeerLost`.
    """

    def __init__(self, group: dist.ProcessGroup, *, buffer_bytes: int) -> None:
        self.group, self.rank, self.size, self.pid = group, group.rank(), group.size(), os.getpid()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        buffer_bytes = round_up(buffer_bytes, PAGE)
        calls_bytes = round_up(2 * self.size * CALL_FIELDS * 8, PAGE)
        self.half_bytes = WINDOW_BYTES // 2
        shared_bytes = calls_bytes + buffer_bytes
        self.memory = SharedMemory(
            group, shared_bytes + self.size * WINDOW_BYTES, num_semaphores=NUM_SEMAPHORES
        )
        self.address = self.memory.bytes(0, 1).data_ptr()
        self.calls = self.memory.bytes(0, calls_bytes).view(torch.int64)
        self.buffer = Buffer(self, calls_bytes, buffer_bytes)
        self.windows = [shared_bytes + rank * WINDOW_BYTES for rank in range(self.size)]
        self.num_exchanges = self.num_rounds = 0

    def barrier(self) -> None:
        self.memory.barrier(BARRIER, "all-gather")

    def exchange(self, call: tuple[int, int, int]) -> list[list[int]]:
        """Wait for all ranks; returns what each gathers: bytes, dtype, 1 if it is in the buffer."""
        self.num_exchanges += 1
        calls = self.calls[: 2 * self.size * CALL_FIELDS].view(2, self.size, CALL_FIELDS)
        calls = calls[self.num_exchanges % 2]  # a rank may be one call ahead, not two
        calls[self.rank] = torch.tensor(call)
        self.barrier()
        found = cast(list[list[int]], calls.tolist())
        for rank, other in enumerate(found):
            if other[:2] != list(call[:2]):
                raise ValueError(
                    f"all-gather: rank {self.memory.ranks[rank]} has {other[:2]} where rank "
                    f"{self.memory.ranks[self.rank]} has {list(call[:2])} (bytes, dtype): all "
                    "ranks must call the same collectives in the same order"
                )
        return found

    @torch.no_grad()
    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Set `output` [size · n] to the `input` [n] of every rank, in the order of the ranks."""
        buffer = self.buffer
        direct = buffer.holds(output)
        own = output.chunk(self.size)[self.rank] if output.numel() else output
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        found = self.exchange((own.nbytes, _code(own.dtype), int(direct)))
        if direct:  # otherwise another tensor may still use the buffer and release it
            buffer.shared = True
        buffer.owed.update(peer for peer in self.peers if found[peer][2])
        if all(other[2] for other in found):
            return
        parts = _bytes(output).view(self.size, -1)
        for first in range(0, own.nbytes, self.half_bytes):
            last = min(first + self.half_bytes, own.nbytes)
            windows = self._halves(last - first)
            windows[self.rank].copy_(parts[self.rank, first:last])
            self.barrier()
            for peer in self.peers:
                parts[peer, first:last] = windows[peer]

    @torch.no_grad()
    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        """Set `output` [n] to this rank's part of the sum of all ranks' `input` [size · n].

        Both are contiguous. Terms are added in the order of the ranks.
        """
        self.exchange((input.nbytes, _code(input.dtype), 0))
        parts, result = input.view(self.size, -1), output.view(-1)
        most = self.half_bytes // self.size // input.itemsize
        for first in range(0, len(result), most):
            piece = slice(first, first + most)
            mine = parts[:, piece]
            windows = [w.view(input.dtype).view(mine.shape) for w in self._halves(mine.nbytes)]
            windows[self.rank].copy_(mine)
            self.barrier()
            result[piece] = windows[0][self.rank]
            for window in windows[1:]:
                result[piece] += window[self.rank]

    def _halves(self, num_bytes: int) -> list[Tensor]:
        """Return the next half of each rank's window, which every rank has finished reading."""
        self.num_rounds += 1
        offset = self.num_rounds % 2 * self.half_bytes
        return [self.memory.bytes(start + offset, num_bytes) for start in self.windows]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


_DTYPES = sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype)
