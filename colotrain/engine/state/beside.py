"""A copy of a GPU's state that is made while the next gradients are computed.

Parameters and optimizer state do not change before the next update, so that they may be on their
way to the host until then; what a forward changes is copied on the GPU first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from colotrain.engine.offload.page_locked import page_locked

ALIGNMENT = 64


class BesideGradients:
    """Page-locked host memory for a rank's state, a stream that fills it, and a thread.

    One copy is made at a time: `finish` must be called before the next one, and before the state
    changes.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.memory: Tensor | None = None
        self._thread = ThreadPoolExecutor(1, "memory-copy")
        self._held: list[Tensor] = []
        """What is being copied, which must stay until it has been."""
        self._pending: Future[None] | None = None

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        changing: Collection[str],
        write: Callable[[dict[str, Tensor]], None],
    ) -> float:
        """Queue the copies; `write` gets them on the thread when they are there.

        `changing` are names of tensors that a forward changes. Returns the seconds that locking
        memory took, which the first copy alone does.
        """
        began = time.perf_counter()
        end = sum(_room(tensor) for tensor in tensors.values())
        if self.memory is None or self.memory.numel() < end:
            self.memory = page_locked(end)
        locking_s = time.perf_counter() - began
        given = {n: t.clone() if n in changing else t for n, t in tensors.items()}
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            on_host = self._to_host(given)
            there = self.stream.record_event()
        self._held = list(given.values())

        def write_when_there() -> None:
            there.synchronize()
            write(on_host)

        self._pending = self._thread.submit(write_when_there)
        return locking_s

    def finish(self) -> None:
        """Wait until the copy is written; raises the error because of which it is not."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        finally:
            self._held = []

    def _to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queue the copies into one block of memory; what is on the host stays where it is."""
        assert self.memory is not None
        found, start = dict(tensors), 0
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                there = self.memory[start : start + tensor.nbytes]
                found[name] = there.view(tensor.dtype).view(tensor.shape)
                found[name].copy_(tensor, non_blocking=True)
                start += _room(tensor)
        return found


def _room(tensor: Tensor) -> int:
    """Bytes of page-locked memory for a tensor; none for one on the host, which stays there."""
    return 0 if tensor.device.type == "cpu" else tensor.nbytes + -tensor.nbytes % ALIGNMENT
