"""Activations and their gradients on the way between neighbouring stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.waiting import waiting


class Exchange:
    """Sends to and receives from the ranks of neighbouring stages, each direction in its order.

    `forward` and `backward` are two process groups of the same ranks, one rank per stage: on a GPU
    what one group has queued would otherwise hold up the other direction. Sends do not wait.
    """

    def __init__(self, forward: dist.ProcessGroup, backward: dist.ProcessGroup) -> None:
        self.forward, self.backward = forward, backward
        self.stage = forward.rank()
        self.sent: list[tuple[Any, Tensor]] = []

    def send_activations(self, tensor: Tensor) -> None:
        self._send(tensor, self.forward, self.stage + 1)

    def receive_activations(self, like: Tensor) -> Tensor:
        return self._receive(like, self.forward, self.stage - 1)

    def send_gradient(self, tensor: Tensor) -> None:
        self._send(tensor, self.backward, self.stage - 1)

    def receive_gradient(self, like: Tensor) -> Tensor:
        return self._receive(like, self.backward, self.stage + 1)

    def finish(self) -> None:
        """Wait until everything is sent, so that its memory can be freed."""
        with waiting():
            for work, _ in self.sent:
                work.wait()
        self.sent.clear()

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, stage: int) -> None:
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=stage), tensor))

    def _receive(self, like: Tensor, group: dist.ProcessGroup, stage: int) -> Tensor:
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        with waiting():
            dist.recv(received, group=group, group_src=stage)
        return received
