"""The optimizer: torch's own, over this rank's shards, addressed by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain.engine.sharding import local_shard
from colotrain.plan import OptimPlan


class ShardOptimizer:
    """Steps every trainable parameter once per step, on plain local tensors.

    The optimizer never sees a DTensor: updates are elementwise, so that a shard's update is the
    shard of the update. `steps` counts what the optimizer itself did.
    """

    def __init__(self, plan: OptimPlan, *, max_steps: int) -> None:
        self.plan, self.max_steps, self.steps = plan, max_steps, 0
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

    def drop(self, names: Iterable[str]) -> None:
        """Cease to train parameters, and forget their state."""
        assert self.torch is not None
        dropped = {self.shards.pop(name) for name in names}
        self.parameters = {n: p for n, p in self.parameters.items() if n in self.shards}
        for shard in dropped:
            self.torch.state.pop(shard, None)
        for group in self.torch.param_groups:
            group["params"] = [shard for shard in group["params"] if shard not in dropped]

    def step(self, *, factor: float) -> float:
        """One update with the gradients times `factor`; returns the learning rate used."""
        assert self.torch is not None
        lr = self.plan.lr * schedule(self.plan, self.steps, self.max_steps)
        for group in self.torch.param_groups:
            group["lr"] = lr
        for name, shard in self.shards.items():
            grad = self.parameters[name].grad
            shard.grad = None if grad is None else local_shard(grad)
        scale_([s.grad for s in self.shards.values() if s.grad is not None], factor)
        self.torch.step()
        for shard in self.shards.values():
            shard.grad = None
        return lr

    def _count(self, *_: object) -> None:
        self.steps += 1

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
        for shard in self.shards.values():
            if self.torch.state[shard]:
                continue
            self.torch.state[shard] = _blank_state(self.plan, shard)


def _make(plan: OptimPlan, groups: list[dict]) -> torch.optim.Optimizer:
    if plan.name == "adamw":
        betas = (plan.betas[0], plan.betas[1])
        return torch.optim.AdamW(groups, lr=plan.lr, betas=betas, eps=plan.eps, fused=True)
    return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.betas[0], fused=True)


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
