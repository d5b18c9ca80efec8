"""Whole matrices for one rank each: parts go to its owner, and parts of its result come back.

An update that needs a whole matrix is computed by one of the ranks that divide it, not by each of
them. Which rank that is follows from the shapes alone (`spec.optimizers.rounds_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.optim.base import Slices


class Exchange:
    """One round: matrices, of which each rank of `group` owns one or none.

    `parts` say of each matrix, by rank of the group, where the rank's numbers stand in it, and
    `owners` are ranks of the group. All ranks must call `to_owners`, and then `to_ranks`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        parts: Sequence[Sequence[Slices]],
        owners: Sequence[int],
    ) -> None:
        self.group, self.owners = group, owners
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.parts = dict(zip(owners, parts, strict=True))

    def _numel(self, *, owner: int, rank: int) -> int:
        """Return the elements of the owner's matrix that `rank` has."""
        if owner not in self.parts:
            return 0
        rows, columns = self._shape(owner, rank)
        return rows * columns

    def _shape(self, owner: int, rank: int) -> tuple[int, int]:
        rows, columns = self.parts[owner][rank]
        return rows.stop - rows.start, columns.stop - columns.start

    def _sends(self, *, owner: int, rank: int) -> bool:
        """Whether `rank` is the first of those that have the same part of the owner's matrix."""
        parts = self.parts.get(owner)
        return parts is not None and parts.index(parts[rank]) == rank

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
        """Return the matrix that this rank owns, of the parts that all ranks have of it."""
        if self.size == 1:
            return parts[0]
        order = sorted(range(len(parts)), key=lambda index: self.owners[index])
        sending = [i for i in order if self._sends(owner=self.owners[i], rank=self.rank)]
        ranks = range(self.size)
        sent = [
            self._sends(owner=rank, rank=self.rank) * self._numel(owner=rank, rank=self.rank)
            for rank in ranks
        ]
        received = [
            self._sends(owner=self.rank, rank=rank) * self._numel(owner=self.rank, rank=rank)
            for rank in ranks
        ]
        like = parts[0].new_empty(0)
        flat = torch.cat([like, *(parts[index].flatten() for index in sending)])
        found = self._exchange(flat, sent, received)
        return self._joined(found, received) if self.rank in self.parts else None

    def _joined(self, found: Tensor, received: list[int]) -> Tensor:
        """Return the matrix of which `found` has the parts of all ranks, one after the other."""
        parts = self.parts[self.rank]
        whole = tuple(max(part[dim].stop for part in parts) for dim in (0, 1))
        if all(part[1] == slice(0, whole[1]) for part in parts):
            return found.view(whole)
        matrix = found.new_empty(whole)
        for rank, numbers in enumerate(found.split(received)):
            if len(numbers):
                matrix[parts[rank]] = numbers.view(self._shape(self.rank, rank))
        return matrix

    def to_ranks(self, whole: Tensor | None, like: Tensor) -> list[Tensor]:
        """Return this rank's part of every owner's result; `like` has their dtype and device."""
        if self.size == 1:
            assert whole is not None
            return [whole]
        sent = [self._numel(owner=self.rank, rank=rank) for rank in range(self.size)]
        received = [self._numel(owner=rank, rank=self.rank) for rank in range(self.size)]
        flat = like.new_empty(0) if whole is None else self._by_ranks(whole, sent)
        of_owners = self._exchange(flat, sent, received).split(received)
        return [of_owners[o].view(self._shape(o, self.rank)) for o in self.owners]

    def _by_ranks(self, whole: Tensor, sent: list[int]) -> Tensor:
        """Return the parts of all ranks, one after the other."""
        parts = self.parts[self.rank]
        if sum(sent) == whole.numel() and all(p[1] == slice(0, whole.shape[1]) for p in parts):
            return whole.reshape(-1)
        return torch.cat([whole[part].reshape(-1) for part in parts])
