"""Activations and their gradients on the way between neighbouring stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.shm.link import Link
from colotrain.engine.shm.shared_memory import Unavailable
from colotrain.engine.waiting import waiting
from colotrain.torch_internals import wait_as_long_as_all_


class Exchange:
    """Sends to and receives from the ranks of neighbouring stages, each direction in its order.

    `forward` and `backward` are two process groups of the same ranks, one rank per stage: on a GPU
    what one group has queued would otherwise hold up the other direction. `links` has the shared
    memory with a neighbouring stage on the same host (CPU), through which everything goes that is
    no larger than planned. Sends through a process group do not wait.
    """

    def __init__(
        self,
        forward: dist.ProcessGroup,
        backward: dist.ProcessGroup,
        links: Mapping[int, Link] | None = None,
    ) -> None:
        self.forward, self.backward, self.links = forward, backward, links or {}
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

    def _link(self, tensor: Tensor, stage: int) -> Link | None:
        """Return the shared memory for `tensor`; both stages decide by its size alone."""
        link = self.links.get(stage)
        return link if link is not None and tensor.nbytes <= link.most_bytes else None

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, stage: int) -> None:
        if (link := self._link(tensor, stage)) is not None:
            link.send(tensor.detach(), f"the exchange with stage {stage}")
            return
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=stage), tensor))

    def _receive(self, like: Tensor, group: dist.ProcessGroup, stage: int) -> Tensor:
        if (link := self._link(like, stage)) is not None:
            return link.receive(like, f"the exchange with stage {stage}")
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        with waiting():
            dist.recv(received, group=group, group_src=stage)
        return received


def make_links(pairs: Sequence[tuple[int, int]], most_bytes: int) -> dict[int, Link]:
    """Return rank → shared memory of this rank with another one, where a host holds both.

    `pairs` are the ranks of neighbouring stages that exchange. All ranks must call.
    """
    rank, links = dist.get_rank(), {}
    groups = [(pair, dist.new_group(list(pair))) for pair in pairs]
    for pair, group in groups:
        if rank in pair:
            wait_as_long_as_all_(group)
            with suppress(Unavailable):
                links[sum(pair) - rank] = Link(group, most_bytes)
    return links
