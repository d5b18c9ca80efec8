"""The optimizer: torch's own, over this rank's shards, addressed by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain.engine.placement import Tiers
from colotrain.engine.sharding import local_shard
from colotrain.plan import OptimPlan


class Watch(Protocol):
    """Sees the shards of some parameters just before and just after their update."""

    def before_update(self, names: list[str]) -> None: ...

    def after_update(self, names: list[str]) -> None: ...


class ShardOptimizer:
    """Steps every trainable parameter once per step, on plain local tensors.

    The optimizer never sees a DTensor: updates are elementwise, so that a shard's update is the
    shard of the update. `steps` counts what the optimizer itself did. With `tiers` whose placement
    streams, parameters are updated group by group while their state is at hand.
    """

    def __init__(self, plan: OptimPlan, *, max_steps: int, tiers: Tiers | None = None) -> None:
        self.plan, self.max_steps, self.steps, self.tiers = plan, max_steps, 0, tiers
        self._calls = 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, nn.Parameter] = {}
        self.torch: torch.optim.Optimizer | None = None

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Begin to train `parameters` (name → sharded parameter)."""
        fresh = {n: nn.Parameter(local_shard(p.detach())) for n, p in parameters.items()}
        self.parameters.update(parameters)
        self.shards.update(fresh)
        for decay in (True, False):
            chosen = [s for n, s in fresh.items() if (parameters[n].ndim >= 2) == decay]
            if not chosen:
                continue
            group = {"params": chosen, "weight_decay": self.plan.weight_decay if decay else 0.0}
            if self.torch is None:
                self.torch = _make(self.plan, [group])
                self.torch.register_step_post_hook(self._count)
            else:
                self.torch.add_param_group(group)
        if self.tiers is not None:
            self.tiers.watch_gradients()

    @property
    def streams(self) -> bool:
        """Whether the update goes group by group. Stored gradients are not scaled then."""
        return self.tiers is not None and self.tiers.placement.streams

    def drop(self, names: Iterable[str]) -> None:
        """Cease to train parameters, and forget their state."""
        assert self.torch is not None
        names = list(names)
        if self.tiers is not None:
            self.tiers.forget(names)
        dropped = {self.shards.pop(name) for name in names}
        self.parameters = {n: p for n, p in self.parameters.items() if n in self.shards}
        for shard in dropped:
            self.torch.state.pop(shard, None)
        for group in self.torch.param_groups:
            group["params"] = [shard for shard in group["params"] if shard not in dropped]

    def step(self, *, factor: float, watch: Watch | None = None) -> float:
        """One update with the gradients times `factor`; returns the learning rate used."""
        assert self.torch is not None
        lr = self.plan.lr * schedule(self.plan, self.steps, self.max_steps)
        for group in self.torch.param_groups:
            group["lr"] = lr
        self._calls, visits = 0, 0
        for names in self._visits():
            visits += 1
            if watch is not None:
                watch.before_update(names)
            self._update(names, factor)
            if watch is not None:
                watch.after_update(names)
        self.steps += self._calls // max(visits, 1)
        return lr

    def _visits(self) -> Iterable[list[str]]:
        """All names at once, or as their groups come by."""
        if self.tiers is not None and self.streams:
            return self.tiers.visit(self)
        return [list(self.shards)]

    def _update(self, names: list[str], factor: float) -> None:
        """Step `names` alone: torch's optimizers pass over parameters without a gradient."""
        assert self.torch is not None
        grads = {n: local_shard(g) for n in names if (g := self.parameters[n].grad) is not None}
        if not self.streams:
            scale_(list(grads.values()), factor)
        elif factor != 1.0 and grads:  # what was stored below stays as it is there
            scaled = torch._foreach_mul(list(grads.values()), factor)
            grads = dict(zip(grads, scaled, strict=True))
        for name, grad in grads.items():
            self.shards[name].grad = grad
        self.torch.step()
        for name in grads:
            self.shards[name].grad = None

    def _count(self, *_: object) -> None:
        self._calls += 1

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Name → state tensors; those of the parameter's shape are DTensors laid out like it."""
        assert self.torch is not None
        return {
            name: {
                key: _like(self.parameters[name], value)
                for key, value in self.torch.state[shard].items()
                if isinstance(value, Tensor)
            }
            for name, shard in self.shards.items()
            if shard in self.torch.state
        }

    def prepare_state_(self) -> None:
        """Make zeroed state for every parameter, so that a checkpoint can be read into it."""
        assert self.torch is not None
        for shard in (self.shards[name] for names in self._visits() for name in names):
            if not self.torch.state[shard]:
                self.torch.state[shard] = _blank_state(self.plan, shard)


def _make(plan: OptimPlan, groups: list[dict]) -> torch.optim.Optimizer:
    if plan.name == "adamw":
        betas = (plan.betas[0], plan.betas[1])
        return torch.optim.AdamW(groups, lr=plan.lr, betas=betas, eps=plan.eps, fused=True)
    return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.betas[0], fused=True)


def state_ratio(plan: OptimPlan) -> float:
    """Bytes of optimizer state per byte of parameter, as one step on a small matrix shows."""
    matrix = nn.Parameter(torch.zeros(64, 64))
    matrix.grad = torch.zeros_like(matrix)
    small = _make(plan, [{"params": [matrix]}])
    small.step()
    tensors = [t for t in small.state[matrix].values() if isinstance(t, Tensor) and t.ndim]
    return sum(t.numel() * t.itemsize for t in tensors) / (matrix.numel() * matrix.itemsize)


def _blank_state(plan: OptimPlan, shard: nn.Parameter) -> dict[str, Tensor]:
    if plan.name == "adamw":
        step = torch.zeros((), dtype=torch.float32, device=shard.device)
        moments = {key: torch.zeros_like(shard.data) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **moments}
    if plan.betas[0]:
        return {"momentum_buffer": torch.zeros_like(shard.data)}
    return {}


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def scale_(tensors: list[Tensor], factor: float) -> None:
    """Multiply all in place; nothing is touched when the factor is one."""
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)


def schedule(plan: OptimPlan, step: int, max_steps: int) -> float:
    """Share of the peak learning rate in `step` (0 is the first): warm-up, then the shape.

    cosine: SGDR's half cosine (Loshchilov and Hutter 2017), down to `final_ratio`.
    """
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if plan.schedule == "constant":
        return 1.0
    span = max(max_steps - 1 - plan.warmup_steps, 1)
    progress = min((step - plan.warmup_steps) / span, 1.0)
    if plan.schedule == "linear":
        return 1.0 - (1.0 - plan.final_ratio) * progress
    return plan.final_ratio + (1.0 - plan.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
