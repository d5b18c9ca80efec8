"""Whole matrices for one rank each: rows go to a matrix's owner, and rows of its result come back.

An update that needs a whole matrix is computed by one of the ranks that divide its rows, not by
each of them. Which rank that is follows from the shapes alone (`spec.optimizers.rounds_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.parts.part_map import rows_of


class Exchange:
    """One round: matrices, of which each rank of `group` owns one or none.

    `shapes` are those of the whole matrices, and `owners` their ranks in the group. All ranks must
    call `to_owners`, and then `to_ranks`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shapes: Sequence[Sequence[int]],
        owners: Sequence[int],
    ) -> None:
        self.group, self.owners = group, owners
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.shapes = dict(zip(owners, shapes, strict=True))

    def _numel(self, *, owner: int, rank: int) -> int:
        """Return the elements of the owner's matrix whose rows `rank` has."""
        if owner not in self.shapes:
            return 0
        rows, columns = self.shapes[owner]
        return rows_of(rows, rank, self.size)[1] * columns

    def _exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send and receive so many elements to and from each rank, as bytes: gloo lacks dtypes."""
        width, found = tensor.itemsize, tensor.new_empty(sum(received))
        dist.all_to_all_single(
            found.view(torch.uint8),
            tensor.view(torch.uint8),
            [width * num for num in received],
            [width * num for num in sent],
            group=self.group,
        )
        return found

    def to_owners(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the matrix that this rank owns, of the rows that all ranks have of it."""
        if self.size == 1:
            return parts[0]
        order = sorted(range(len(parts)), key=lambda index: self.owners[index])
        sent = [self._numel(owner=rank, rank=self.rank) for rank in range(self.size)]
        received = [self._numel(owner=self.rank, rank=rank) for rank in range(self.size)]
        flat = torch.cat([parts[index].flatten() for index in order])
        found = self._exchange(flat, sent, received)
        own = self.shapes.get(self.rank)
        return None if own is None else found.view(*own)

    def to_ranks(self, whole: Tensor | None, like: Tensor) -> list[Tensor]:
        """Return this rank's rows of every owner's result; `like` has their dtype and device."""
        if self.size == 1:
            assert whole is not None
            return [whole]
        sent = [self._numel(owner=self.rank, rank=rank) for rank in range(self.size)]
        received = [self._numel(owner=rank, rank=self.rank) for rank in range(self.size)]
        flat = like.new_empty(0) if whole is None else whole.reshape(-1)
        of_owners = self._exchange(flat, sent, received).split(received)
        return [of_owners[owner].view(-1, self.shapes[owner][1]) for owner in self.owners]
