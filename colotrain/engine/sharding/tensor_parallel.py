"""Dividing a model's matrices among the ranks of tensor-parallel groups (`mesh.tp`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.comms.groups import Groups
from colotrain.engine.sharding.context_parallel import collectives_of
from colotrain.errors import UsageError
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_
from colotrain.models.tensor_parallel_styles import (
    apply_styles_,
    own_divisions,
    partial_parameters,
)
from colotrain.spec.axes import TP, Axis
from colotrain.spec.divisions import SUM_BYTES, Split
from colotrain.spec.plan import RunPlan


@dataclass(slots=True, kw_only=True)
class TensorGroup:
    """This rank of a tensor-parallel group, and the parameters that the group divides."""

    axis: Axis = TP
    """The axis of the mesh in which the ranks of the group differ."""
    shard: TensorShard = field(default_factory=lambda: TensorShard(rank=0, size=1))
    splits: dict[str, Split] = field(default_factory=dict)
    """Parameter → what this rank has of it; all others are whole, and equal on all ranks."""
    partial: frozenset[str] = frozenset()
    """Names of replicated parameters whose gradients each rank computes only in part.

    Their gradients must be summed over the tensor-parallel group.
    """

    def sum_(self, gradients: Sequence[Tensor], device: str) -> None:
        """Set gradients to their sums over the group, with the same bits on all of its ranks.

        All ranks must call, with gradients of the same shapes on any device. `device` has a few
        buffers of `SUM_BYTES`.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        flats = [gradient.contiguous().view(-1) for gradient in gradients]
        for flat in flats:
            by_dtype.setdefault(flat.dtype, []).append(flat)
        for dtype, alike in by_dtype.items():
            for pieces in _pieces(alike, SUM_BYTES // dtype.itemsize):
                bucket = torch.cat([piece.to(device) for piece in pieces])
                sums = self.shard.sum(bucket).split([piece.numel() for piece in pieces])
                for piece, total in zip(pieces, sums, strict=True):
                    piece.copy_(total)
        for gradient, flat in zip(gradients, flats, strict=True):
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def used_by_any(self, used: Sequence[bool], device: str) -> list[bool]:
        """Return which gradients some rank of the group has: those that this one has."""
        return list(used)

    def connect_(self, group: dist.ProcessGroup, device: str) -> None:
        """Let the model exchange with the ranks of `group`, which must all call.

        No forward may run on a single rank afterwards.
        """
        self.shard.all_gather, self.shard.reduce_scatter = collectives_of(group, device)


def _pieces(flats: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield views of all numbers of the tensors, in their order, `most` numbers at a time."""
    found, room = list[Tensor](), most
    for flat in flats:
        while flat.numel():
            piece, flat = flat[:room], flat[room:]
            found.append(piece)
            room -= piece.numel()
            if not room:
                yield found
                found, room = [], most
    if found:
        yield found


def divide_parameters_among_ranks_(model: nn.Module, plan: RunPlan, comms: Groups) -> TensorGroup:
    """Leave this rank's parts of the parameters in `model`, as `mesh.tp` says."""
    size = plan.mesh.tp
    how = own_divisions(model, plan.model)
    if how is None:
        raise UsageError(
            f"mesh.tp={size}: {plan.model.value} cannot divide its matrices among ranks",
            "set mesh.tp=1",
        )
    index, by_tokens = comms.ranks.coords(comms.rank)[TP], plan.mesh.sequence_parallel
    shard = TensorShard(rank=index, size=size, by_tokens=by_tokens)
    splits = divide_parameters_(model, how, shard)
    apply_styles_(model, how, shard)
    partial = partial_parameters(model, how, shard, splits)
    return TensorGroup(shard=shard, splits=splits, partial=partial)
