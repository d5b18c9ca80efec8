"""Dividing a model's experts among ranks with samples of their own (`mesh.ep`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.engine.sharding.tensor_parallel import TensorGroup
from colotrain.errors import UsageError
from colotrain.models.expert_parallel import ExpertShard, expert_divisions, share_tokens_
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_
from colotrain.spec.axes import EP
from colotrain.spec.plan import RunPlan


@dataclass(slots=True, kw_only=True)
class ExpertGroup(TensorGroup):
    """This rank of a group that divides experts; all its other parameters have partial gradients.

    Ranks of the group have the gradients of their own samples, which are summed once a step.
    """

    experts: ExpertShard

    def connect_(self, group: dist.ProcessGroup, device: str) -> None:
        TensorGroup.connect_(self, group, device)
        self.experts.all_to_all = partial(all_to_all, group=group)

    def used_by_any(self, used: Sequence[bool], device: str) -> list[bool]:
        """Return which gradients some rank of the group has. All ranks must call."""
        shared = self.shard.sum(torch.tensor(used, dtype=torch.float32, device=device))
        return [count > 0 for count in shared.tolist()]


def divide_experts_among_ranks_(model: nn.Module, plan: RunPlan, comms: Groups) -> ExpertGroup:
    """Leave this rank's experts in `model`, as `mesh.ep` says."""
    size, index = plan.mesh.ep, comms.ranks.coords(comms.rank)[EP]
    how = expert_divisions(model, plan.model)
    if not how.allows(size):
        raise UsageError(
            f"mesh.ep={size}: {plan.model.value} cannot divide its experts among ranks"
            + (f" ({how.against})" if how.against else ""),
            "set mesh.ep=1",
        )
    shard = TensorShard(rank=index, size=size)
    splits = divide_parameters_(model, how, shard)
    experts = ExpertShard(rank=index, size=size)
    share_tokens_(model, how, experts)
    dense = (n for n, _ in module_tree.named_parameters(model) if n not in splits)
    return ExpertGroup(
        axis=EP, shard=shard, splits=splits, partial=frozenset(dense), experts=experts
    )


def all_to_all(
    rows: Tensor, to: Sequence[int], of: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """Send `to[i]` of the rows to rank i of the group, and return those that it sends, `of[i]`."""
    received = rows.new_empty((sum(of), *rows.shape[1:]))
    dist.all_to_all_single(received, rows, list(of), list(to), group=group)
    return received
