"""Activations and their gradients on the way between neighbouring stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.groups import Groups
from colotrain.engine.comms.link import Link
from colotrain.engine.comms.shared_memory import Unavailable
from colotrain.engine.comms.waiting import waiting
from colotrain.spec.cpu_memory import NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Way:
    """The way between this stage and a neighbouring one."""

    peer: int
    """The other stage."""
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    """Another process group than that of activations: on a GPU what one has queued would hold up
    the other direction."""
    link: Link | None
    """Shared memory of both, on the same host (CPU), for tensors that are no larger than planned.

    Both stages decide by a tensor's size alone.
    """

    def link_for(self, tensor: Tensor) -> Link | None:
        return (
            self.link if self.link is not None and tensor.nbytes <= self.link.most_bytes else None
        )


class Exchange:
    """Sends to and receives from the ranks of neighbouring stages, each direction in its order.

    `forward` and `backward` are two process groups of the same ranks, one rank per stage, for
    activations and gradients. Two more, `around`, are for the way from the last stage to the first
    one's next chunk, so that in each of them everything goes one way, also between two stages.
    `links` has the shared memory by the stage that passes activations on. Sends through a process
    group do not wait.
    """

    def __init__(
        self,
        forward: dist.ProcessGroup,
        backward: dist.ProcessGroup,
        links: Mapping[int, Link] | None = None,
        around: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.forward, self.backward, self.links = forward, backward, links or {}
        stage, last = forward.rank(), forward.size() - 1
        after, before = (stage + 1) % (last + 1), (stage - 1) % (last + 1)
        self.ways: dict[str, Way] = {}
        """The ways `on` to the stage that gets this one's activations, and `back` to the other."""
        if stage < last or around:
            own, other = (forward, backward) if stage < last else around
            self.ways["on"] = Way(after, own, other, self.links.get(stage))
        if stage or around:
            own, other = (forward, backward) if stage else around
            self.ways["back"] = Way(before, own, other, self.links.get(before))
        self.sent: list[tuple[Any, Tensor]] = []

    def send_activations(self, tensor: Tensor) -> None:
        self._send(tensor, self.ways["on"], self.ways["on"].activations)

    def receive_activations(self, like: Tensor) -> Tensor:
        return self._receive(like, self.ways["back"], self.ways["back"].activations)

    def send_gradient(self, tensor: Tensor) -> None:
        self._send(tensor, self.ways["back"], self.ways["back"].gradients)

    def receive_gradient(self, like: Tensor) -> Tensor:
        return self._receive(like, self.ways["on"], self.ways["on"].gradients)

    def finish(self) -> None:
        """Wait until everything is sent, so that its memory can be freed."""
        with waiting():
            for work, _ in self.sent:
                work.wait()
        self.sent.clear()

    def _send(self, tensor: Tensor, way: Way, group: dist.ProcessGroup) -> None:
        if (link := way.link_for(tensor)) is not None:
            link.send(tensor.detach(), f"the exchange with stage {way.peer}")
            return
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=way.peer), tensor))

    def _receive(self, like: Tensor, way: Way, group: dist.ProcessGroup) -> Tensor:
        if (link := way.link_for(like)) is not None:
            return link.receive(like, f"the exchange with stage {way.peer}")
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        with waiting():
            dist.recv(received, group=group, group_src=way.peer)
        return received


def make_links(
    pairs: Sequence[tuple[int, ...]], most_bytes: int, comms: Groups, num_slots: int = NUM_SLOTS
) -> dict[int, Link]:
    """Return first rank of a pair → the pair's shared memory, where a host holds both ranks.

    `pairs` are the ranks of neighbouring stages that exchange, and the links those of this rank's
    own pairs. All ranks must call.
    """
    links = {}
    for (before, _), group in comms.new(pairs).items():
        with suppress(Unavailable):
            links[before] = Link(group, most_bytes, num_slots)
    return links
