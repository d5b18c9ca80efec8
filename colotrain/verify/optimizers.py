"""The optimizers in plain torch, one for each parameter, and their learning rates."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.dotted import import_target
from colotrain.spec.plan import OptimPlan, RunPlan

Optimizers = dict[str, tuple[torch.optim.Optimizer, float]]
"""Name of a parameter → its optimizer, and its learning rate before the schedule."""


def add_to_(
    optimizers: Optimizers, model: nn.Module, plan: RunPlan, own: Mapping[str, torch.dtype]
) -> None:
    """Add an optimizer, with its learning rate, for every newly trained parameter.

    `own` are the parameters' dtypes in the run.
    """
    undecayed = names_without_decay(model)
    every = [*module_tree.named_parameters(model, remove_duplicate=False)]
    for name, parameter in module_tree.named_parameters(model):
        if parameter.requires_grad and name not in optimizers:
            names = [known_as for known_as, other in every if other is parameter]
            made = optimizer_of(name, parameter, plan.optim, undecayed, own[name], names)
            optimizers[name] = made, made.param_groups[0]["lr"]


def optimizer_of(
    name: str,
    parameter: nn.Parameter,
    plan: OptimPlan,
    undecayed: Container[str],
    own: torch.dtype,
    names: Sequence[str],
) -> torch.optim.Optimizer:
    """Optimizer of one parameter. Its learning rate is `plan.lr` times `lr_scale` of a rule.

    A rule may match any of the `names` of a tied parameter. Adafactor adds the smallest difference
    that the parameter's dtype in the run, `own`, knows.
    """
    is_matrix = name not in undecayed
    lr, decay = plan.lr, plan.weight_decay if is_matrix else 0.0
    for rule in plan.rules:
        if fnmatch.filter(names, rule.match):
            lr = plan.lr * rule.lr_scale if rule.lr_scale is not None else lr
            decay = rule.weight_decay if rule.weight_decay is not None else decay
    group: dict[str, Any] = {"params": [parameter], "lr": lr, "weight_decay": decay}
    betas, is_hidden = (plan.betas[0], plan.betas[-1]), is_matrix and parameter.ndim == 2
    if plan.name == "sgd":
        return torch.optim.SGD([group], momentum=plan.betas[0])
    if plan.name == "adafactor":
        return torch.optim.Adafactor([group], eps=(torch.finfo(own).eps, 1e-3))
    if plan.name == "lion":
        return PlainLion([group], {"betas": betas})
    if plan.name == "adamw8bit":
        return PlainAdamW8bit([group], {"betas": betas, "eps": plan.eps})
    if plan.name == "schedule_free_adamw":
        return PlainScheduleFree([group], {"betas": betas, "eps": plan.eps})
    if plan.name == "muon" and is_hidden and re.search(r"(^|\.)[0-9]+\.", name):
        return torch.optim.Muon([group], momentum=betas[1], adjust_lr_fn="match_rms_adamw")
    if plan.name in ("adamw", "muon"):
        return torch.optim.AdamW([group], betas=betas, eps=plan.eps)
    own = import_target("optim.name", plan.name)([group], lr=lr, **plan.args)
    assert isinstance(own, torch.optim.Optimizer), "checked when the plan was made"
    return own


class PlainLion(torch.optim.Optimizer):
    """Lion as in its paper (Chen et al. 2023, algorithm 2), since torch has none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for weight in group["params"]:
                gradient: Tensor = weight.grad
                if gradient is None:
                    continue
                moment = self.state[weight].get("m", torch.zeros_like(weight))
                direction = torch.sign(beta1 * moment + (1 - beta1) * gradient)
                weight.copy_(weight - rate * (direction + decay * weight))
                self.state[weight]["m"] = beta2 * moment + (1 - beta2) * gradient


class PlainScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW as the paper has it (Defazio et al. 2024, algorithm 1), with all three
    points of each parameter; decay is of y, as in the authors' code."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                count = state["t"] = state.get("t", 0) + 1
                state["rate"] = max(rate, state.get("rate", 0.0))
                state["sum"] = state.get("sum", 0.0) + state["rate"] ** 2
                square = beta2 * state.get("v", 0.0) + (1 - beta2) * y.grad**2
                root = (square / (1 - beta2**count)).sqrt() + group["eps"]
                move = y.grad / root + group["weight_decay"] * y
                z = state.get("z", y) - rate * move
                share = state["rate"] ** 2 / state["sum"]
                mean = (1 - share) * state.get("x", y) + share * z
                state |= {"v": square, "z": z, "x": mean}
                y.copy_(beta1 * mean + (1 - beta1) * z)


class PlainAdamW8bit(torch.optim.Optimizer):
    """AdamW that after each step rounds both moments to what 8 bits can tell of them.

    A run of up to 256 elements, within what one index of the first dimension selects, has a scale.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, gradient = self.state[weight], weight.grad
                count = state["t"] = state.get("t", 0) + 1
                mean = beta1 * state.get("m", 0.0) + (1 - beta1) * gradient
                square = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient**2
                root = (square / (1 - beta2**count)).sqrt() + group["eps"]
                step = mean / (1 - beta1**count) / root + decay * weight
                weight.copy_(weight - rate * step)
                is_large = weight.numel() >= 4096 and weight.ndim > 1 and weight[0].numel() >= 16
                state["m"] = in_8_bits(mean, signed=True) if is_large else mean
                state["v"] = in_8_bits(square, signed=False) if is_large else square


def in_8_bits(values: Tensor, *, signed: bool) -> Tensor:
    """Round each run of 256 to the nearest of 256 values times its largest; a number above zero
    that is never negative stays above zero."""
    found = []
    for run in values.flatten(1).split(256, dim=1):
        scale = run.abs().amax(1, keepdim=True)
        table = torch.tensor(numbers_of_8_bits(signed=signed), dtype=values.dtype) * scale
        index = torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, run.contiguous())
        if not signed:
            index = torch.where(run > 0, index.clamp(min=1), index)
        found.append(table.gather(1, index))
    return torch.cat(found, dim=1).view_as(values)


def numbers_of_8_bits(*, signed: bool) -> list[float]:
    """The dynamic data type of Dettmers et al. 2022: decades, each cut finer than the one below."""
    numbers = {0.0, 1.0}
    for decade in range(7):
        cuts = 2**decade if signed else 2 ** (decade + 1)
        for cut in range(cuts):
            middle = (0.1 + 0.9 * (cut + 0.5) / cuts) * 10.0 ** (decade - 6)
            numbers |= {middle, -middle} if signed else {middle}
    return sorted(numbers)


def names_without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that transformers' own trainer would leave without weight decay:
    those in a module whose class is a norm's, and those that are called a norm or a bias."""
    found = set()
    for name, parameter in module_tree.named_parameters(model, remove_duplicate=False):
        path, _, own = name.rpartition(".")
        owner, called = model.get_submodule(path), path.rpartition(".")[2]
        kinds = " ".join(kind.__name__ for kind in type(owner).__mro__)
        is_matrix = re.search(r"\b(Linear|Embedding|EmbeddingBag|_ConvNd)\b", kinds) is not None
        named = called if own in ("weight", "scale", "gamma", "beta") else own
        is_norm = re.search(r"Norm(?!al)", kinds) or re.search(
            r"norm_?[0-9a-z]?$|(^|_)ln(_?\w)?$", named
        )
        is_bias = re.search(r"(^|_)bias(_|$)", own) or (own == "weight" and called.endswith("bias"))
        if is_bias or (is_norm and not is_matrix) or parameter.ndim < 2:
            found.add(name)
    return found


def learning_rate_factor(plan: RunPlan, step: int) -> float:
    """Factor of the learning-rate schedule, written independently of the engine's."""
    optim, last = plan.optim, plan.train.max_steps - 1
    if ":" in optim.schedule:
        return float(import_target("optim.schedule.name", optim.schedule)(step, last + 1))
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "wsd":
        tail = min(optim.decay_steps or max(plan.train.max_steps // 5, 1), plan.train.max_steps)
        return 1.0 - (1.0 - optim.final_ratio) * max(step - (last - tail), 0) / tail
    done = min((step - optim.warmup_steps) / max(last - optim.warmup_steps, 1), 1.0)
    shape = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
    return 1.0 + (optim.final_ratio - 1.0) * shape[optim.schedule]
