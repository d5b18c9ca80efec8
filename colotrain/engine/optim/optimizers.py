"""The optimizers by name: a row each, and what torch's fused kernels cannot do.

Elementwise optimizers (adamw, sgd, lion, schedule_free_adamw) work on local shards, and so does
adamw8bit, whose blocks lie within rows. muon lets one rank compute on each whole matrix, and
adafactor sums its moments over ranks. A user's own optimizer gets DTensors, on which torch's
operations mean the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colotrain.engine.optim.adafactor import Adafactor
from colotrain.engine.optim.adamw8bit import AdamW8bit
from colotrain.engine.optim.base import Groups, Layout
from colotrain.engine.optim.lion import Lion
from colotrain.engine.optim.muon import Muon
from colotrain.engine.optim.rounded_adamw import RoundedAdamW
from colotrain.engine.optim.schedule_free import ScheduleFreeAdamW
from colotrain.engine.optim.users_optimizers import make_users
from colotrain.errors import ConfigError, Problem
from colotrain.spec.optimizers import OPTIMIZERS, optimizer_of
from colotrain.spec.plan import OptimPlan

MAKERS: dict[str, Callable[[OptimPlan, Groups, Layout], torch.optim.Optimizer]] = {
    "adamw": lambda plan, groups, layout: _adamw(plan, groups, layout),
    "sgd": lambda plan, groups, _: torch.optim.SGD(
        groups, lr=plan.lr, momentum=plan.betas[0], fused=True
    ),
    "adamw8bit": lambda plan, groups, layout: AdamW8bit(
        groups, lr=plan.lr, betas=_both(plan), eps=plan.eps, layout=layout
    ),
    "schedule_free_adamw": lambda plan, groups, _: ScheduleFreeAdamW(
        groups, lr=plan.lr, betas=_both(plan), eps=plan.eps
    ),
    "lion": lambda plan, groups, _: Lion(groups, lr=plan.lr, betas=_both(plan)),
    "muon": lambda plan, groups, layout: Muon(
        groups, lr=plan.lr, betas=_both(plan), eps=plan.eps, layout=layout
    ),
    "adafactor": lambda plan, groups, layout: Adafactor(groups, lr=plan.lr, layout=layout),
}
"""Name → function of the plan, groups of parameters and their layout that makes the optimizer."""


def make(plan: OptimPlan, groups: Groups, layout: Layout) -> torch.optim.Optimizer:
    """Make the plan's optimizer over parameter groups, each with its own weight decay."""
    own = MAKERS.get(plan.name)
    return make_users(plan, groups) if own is None else own(plan, groups, layout)


def _adamw(plan: OptimPlan, groups: Groups, layout: Layout) -> torch.optim.Optimizer:
    if plan.rounding == "nearest":
        return torch.optim.AdamW(groups, lr=plan.lr, betas=_both(plan), eps=plan.eps, fused=True)
    compensates = plan.rounding == "kahan"
    return RoundedAdamW(
        groups,
        lr=plan.lr,
        betas=_both(plan),
        eps=plan.eps,
        layout=layout,
        compensates=compensates,
    )


def _both(plan: OptimPlan) -> tuple[float, float]:
    return plan.betas[0], plan.betas[1]


def needs_loops(optimizer: str, name: str, shard: Tensor) -> bool:
    """Whether torch's fused kernels cannot update a parameter.

    They refuse complex numbers. The fused SGD loses updates in half precision on the CPU: seen with
    torch 2.13, in tensors of more than a few elements most do not change.
    """
    known = optimizer_of(optimizer)
    if shard.is_complex():
        if optimizer in OPTIMIZERS and not known.is_fused:
            fused = " or ".join(other for other, its in OPTIMIZERS.items() if its.is_fused)
            expected = f"{fused}, or an optimizer of your own ({name} has complex numbers)"
            raise ConfigError([Problem(key="optim.name", value=optimizer, expected=expected)])
        return known.is_fused
    halves = shard.device.type == "cpu" and shard.dtype in (torch.bfloat16, torch.float16)
    return halves and known.loses_halves
