"""Decides the tier of every group's bytes, from the budget and from the memory measured so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from colotrain.engine.offload.disk import return_free_memory
from colotrain.engine.probes import held_now, memory_now, reset_peak
from colotrain.events.kinds import TierBytes
from colotrain.spec.offload import (
    MARGIN,
    GroupBytes,
    NonModelBytes,
    Placement,
    Tier,
    bytes_by_tier,
    lower_of,
    moved_bytes,
    place,
    with_parameters_of,
)
from colotrain.spec.plan import RunPlan


class PlacementPolicy:
    """The placement of all groups, the same on all ranks, and when to decide it anew."""

    def __init__(self, plan: RunPlan, sizes: list[GroupBytes], estimate: NonModelBytes) -> None:
        assert plan.plugin.budget is not None
        self.plan, self.budget, self.sizes = plan, plan.plugin.budget, sizes
        self.device = plan.cluster.device
        self.top: Tier = "host" if self.device == "cpu" else "device"
        self.non_model = estimate
        self.placement = self._place()
        self.measured, self.cannot_offload_more = False, False
        self.over_limit = self.freed_at_begin = True

    def _place(self) -> Placement:
        return place(self.sizes, self.budget, self.non_model, device=self.device)

    def offloads(self, index: int) -> bool:
        """Whether a group's parameters start below the device. On CPU they never do."""
        return self.device != "cpu" and self.placement.groups[index].parameters != self.top

    @property
    def _limit(self) -> int:
        return self.budget.host_bytes if self.device == "cpu" else self.budget.device_bytes

    def begin_step(self) -> None:
        """Start measuring memory. Freed memory is kept while all fits: new pages cost time."""
        self.freed_at_begin = self.over_limit or self.placement.streams or held_now() > self._limit
        if self.freed_at_begin:
            return_free_memory()
        reset_peak()

    def exceeds_budget(self) -> bool:
        """Whether this rank used more than its budget, not counting freed memory that it kept."""
        if self.cannot_offload_more:
            return False
        self.over_limit = not self.measured or memory_now()[1] > self._limit
        return self.over_limit and self.freed_at_begin

    def measure(self, *, has_state: bool, gather_bytes: Callable[[Placement], int]) -> Placement:
        """Return the placement for what the last step needed; all ranks must call, then `adopt`.

        The first call may move anything up or down, later calls only down. `has_state` tells
        whether the optimizer has made its state, `gather_bytes` what a placement needs in addition
        to gather parameters that ranks share now.
        """
        now, peak = held_now(), memory_now()[1]
        model = self._resident(has_state=has_state)
        mine = torch.tensor([peak - model, now - model], dtype=torch.int64, device=self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        compute, update = (int(max(n, 0) * (1 + MARGIN)) for n in mine.tolist())
        self.non_model = NonModelBytes(compute=compute, update=update)
        if more := gather_bytes(self._place()):
            self.non_model = NonModelBytes(compute=compute + more, update=update)
        wanted = self._place()
        if self.measured:
            wanted = lower_of(wanted, self.placement)
        if self.device != "cpu":  # `fully_shard` must know from the start where parameters are
            wanted = with_parameters_of(wanted, self.placement)
        return wanted

    def adopt(self, wanted: Placement) -> bool:
        """Use `wanted` from now on; returns whether it differs from the placement before."""
        changed = wanted.groups != self.placement.groups
        self.cannot_offload_more = self.measured and not changed
        self.placement, self.measured = wanted, True
        return changed

    def _resident(self, *, has_state: bool) -> int:
        """Return the bytes of parameters, gradients and optimizer state now in the top tier."""
        kinds = bytes_by_tier(self.sizes, self.placement)
        if not has_state:
            del kinds["optimizer"]
        return sum(tiers.get(self.top, 0) for tiers in kinds.values())

    def describe(self, step: int) -> TierBytes:
        """Return where the bytes of this rank are after `step`."""
        num = self.plan.batch.accumulation_steps
        budget = {k: v for k, v in asdict(self.budget).items() if k.endswith("_bytes")}
        return TierBytes(
            step=step,
            bytes=bytes_by_tier(self.sizes, self.placement),
            need={str(tier): need for tier, need in self.placement.need.items()},
            other=asdict(self.non_model),
            moved_bytes=moved_bytes(self.sizes, self.placement, micro_batches=num),
            fits=self.placement.fits,
            budget=budget,
        )
