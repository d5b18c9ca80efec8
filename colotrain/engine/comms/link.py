"""Tensors that two ranks of one host send each other, through shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.shared_memory import PAGE, SharedMemory, round_up
from colotrain.spec.cpu_memory import NUM_SLOTS

SENT, RECEIVED, NUM_SEMAPHORES = 0, 1, 2  # what the semaphores count


class Link:
    """Sends tensors of at most `most_bytes` to the other rank of `group`, and receives them.

    Both ranks must create it together, and receive in the order of the other's sends. A send waits
    only while the other rank has not received the `num_slots` tensors before. Raises `Unavailable`
    on both ranks or on none; sends and receives raise `PeerLost`.
    """

    def __init__(
        self, group: dist.ProcessGroup, most_bytes: int, num_slots: int = NUM_SLOTS
    ) -> None:
        self.most_bytes, self.num_slots = most_bytes, num_slots
        slot_bytes = round_up(most_bytes, PAGE)
        self.memory = SharedMemory(group, 2 * num_slots * slot_bytes, num_semaphores=NUM_SEMAPHORES)
        self.peer = 1 - self.memory.rank
        self.slots = {
            sender: [(sender * num_slots + slot) * slot_bytes for slot in range(num_slots)]
            for sender in range(2)
        }
        self.num_sent = self.num_received = 0

    def send(self, tensor: Tensor, what: str) -> None:
        """Send a tensor, which may change afterwards. `what` is named if the other rank is lost."""
        if self.num_sent >= self.num_slots:
            self.memory.wait(RECEIVED, self.peer, what=what)
        self._slot(self.memory.rank, self.num_sent, tensor).copy_(tensor)
        self.memory.post(SENT, self.peer)
        self.num_sent += 1

    def receive(self, like: Tensor, what: str) -> Tensor:
        """Return the next tensor of the other rank, which has the shape and dtype of `like`."""
        self.memory.wait(SENT, self.peer, what=what)
        received = torch.empty(like.shape, dtype=like.dtype)
        received.copy_(self._slot(self.peer, self.num_received, received))
        self.memory.post(RECEIVED, self.peer)
        self.num_received += 1
        return received

    def _slot(self, sender: int, index: int, like: Tensor) -> Tensor:
        """Return the place of a rank's tensor number `index`, with the shape of `like`."""
        if not like.nbytes:
            return torch.empty_like(like)
        place = self.memory.bytes(self.slots[sender][index % self.num_slots], like.nbytes)
        return place.view(like.dtype).view(like.shape)
