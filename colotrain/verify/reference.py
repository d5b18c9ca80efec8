"""The reference: one process, plain torch, the whole global batch at once.

It computes in float64 where the model allows it, because in float32 its own rounding may be larger
than that of the plugins, which sum in smaller pieces; and once more in the model's own dtype, to
measure that rounding. It shares with colotrain's engine the code that reads its samples, and no
code that is verified: no initial values, accumulation, freezing, sharding, clipping or optimizer
code.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.read.loader import (
    open_samples,
    planned_collate,
    planned_draw_seed,
    planned_order,
    read_batch,
)
from colotrain.dotted import import_target
from colotrain.engine.generators import states
from colotrain.engine.loss_trial import MOST_SAMPLES, examine
from colotrain.models.loading import begin_training_
from colotrain.models.objective import attach_, output_of
from colotrain.models.outputs import loss_in, pair_in
from colotrain.models.seeding import seeded
from colotrain.spec.plan import FreezePlan, RunPlan
from colotrain.spec.survey import ParameterInfo
from colotrain.torch_internals import BatchNorms, TorchDispatchMode, tree_leaves
from colotrain.verify.building import build_plain
from colotrain.verify.distillation import WithTeacher
from colotrain.verify.masks import MaskedSamples, without_dropout
from colotrain.verify.optimizers import names_without_decay, optimizer_of
from colotrain.verify.preferences import TwoModels

Tensors = dict[str, Tensor]
Optimizers = dict[str, tuple[torch.optim.Optimizer, float]]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Losses, gradients and parameters of a few steps of training; index k is step k."""

    losses: list[float]
    gradients: list[Tensors]
    """Name → whole gradient before clipping; parameters without one are absent."""
    parameters: list[Tensors]
    """Name → value, before the first step and after each."""
    optimizer_steps: int
    frozen: frozenset[str]
    rounding: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Kind ("gradients" or "parameters") → step → name → error of plain torch in its own dtype."""
    draws: bool = False
    """Whether the model's forward draws random numbers other than dropout's."""
    mixes: str = ""
    """Name of the first module or buffer by which the samples of a micro-batch depend on one
    another, as by batch normalization; empty where there is none."""
    no_mean: str = ""
    """Why the loss is no mean over targets; empty where it is one, or nothing is known."""
    computed_in: frozenset[torch.dtype] = frozenset()
    """Dtypes of the forward's results with the model in its own dtype, autocast's included."""


def min_bytes(parameters: Sequence[ParameterInfo], *, steps: int) -> int:
    """Least memory of the reference: the model in float64, and its values after each step."""
    values = sum(parameter.numel * parameter.itemsize for parameter in parameters)
    return 8 * sum(parameter.numel for parameter in parameters) + 2 * (steps + 1) * values


def run_reference(plan: RunPlan, *, steps: int) -> Trajectory:
    """Train the plan's model for `steps` steps in this process.

    Values are in the model's own dtypes. A model that cannot run in float64 (its forward makes
    float32 tensors, say) runs as it is.
    """
    plain = _train(plan, steps=steps, dtype=None)
    try:
        exact = _train(plan, steps=steps, dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError):
        return plain
    rounding = {
        "gradients": list(map(_distances, exact.gradients, plain.gradients)),
        "parameters": list(map(_distances, exact.parameters, plain.parameters)),
    }
    return replace(exact, rounding=rounding, computed_in=plain.computed_in, no_mean=plain.no_mean)


def _distances(wanted: Tensors, found: Tensors) -> dict[str, float]:
    return {name: distance(wanted[name], found[name]) for name in wanted.keys() & found.keys()}


def distance(wanted: Tensor, found: Tensor) -> float:
    """Largest |wanted - found|, infinite where the shapes differ."""
    if wanted.shape != found.shape:
        return math.inf
    return max_abs(widened(wanted) - widened(found))


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; one of whole numbers, as a tensor of float64."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def max_abs(tensor: Tensor) -> float:
    """Largest absolute value; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _train(plan: RunPlan, *, steps: int, dtype: torch.dtype | None) -> Trajectory:
    model = build_plain(plan.model, seed=plan.train.seed)
    attach_(model, plan.model)
    frozen = _freeze(model, plan.freeze, step=0)
    own = {name: p.dtype for name, p in module_tree.named_parameters(model)}
    if dtype is not None:
        for tensor in (*module_tree.parameters(model), *module_tree.buffers(model)):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = widened(tensor.data)
    begin_training_(model)
    serve_signals_(model)
    two_models: TwoModels | WithTeacher | None = None
    if plan.data.pairs:
        two_models = TwoModels(plan, dtype)
    elif plan.model.distill is not None:
        two_models = WithTeacher(plan, dtype)
    draws, seen = False, _Dtypes()
    kept = {name: buffer.clone() for name, buffer in module_tree.named_buffers(model)}
    optimizers: Optimizers = {}
    _add_to(optimizers, model, plan)
    with seeded(plan.train.seed):
        ignored = plan.train.ignore_index
        opened = open_samples(plan.data, "train")
        samples = MaskedSamples(opened, whole=plan.data.pairs, ignored=ignored)
    order, drawn = planned_order(samples.samples, plan), planned_draw_seed(samples.samples, plan)
    size, collate = plan.batch.global_batch, planned_collate(plan.data)
    losses, gradients, parameters, no_mean = [], [], [_values(model, own)], ""
    if dtype is None and two_models is None:
        few = range(min(MOST_SAMPLES, size))
        first = read_batch(samples.samples, order, few, draw_seed=drawn, collate=collate)
        no_mean = examine(model, first).against
    for step in range(steps):
        positions = range(step * size, (step + 1) * size)
        batch = read_batch(samples, order, positions, draw_seed=drawn, collate=collate)
        if dtype is not None:
            wide = {n: t for n, t in batch.items() if t.is_floating_point() or t.is_complex()}
            batch |= {name: widened(tensor) for name, tensor in wide.items()}
        if step in plan.freeze.unfreeze:
            frozen = _freeze(model, plan.freeze, step=step)
            _add_to(optimizers, model, plan)
        model.zero_grad(set_to_none=True)
        before = states(CPU)
        with without_dropout(model):
            with seen:
                if two_models is not None:
                    loss = two_models.mean_loss(model, batch)
                else:
                    loss = _mean_loss(output_of(model, batch))
                    if loss.isnan() and not _has_targets(batch, ignored):  # a mean of none
                        labels = torch.full_like(batch["labels"], int(ignored == 0))
                        loss = 0.0 * _mean_loss(output_of(model, {**batch, "labels": labels}))
            draws = draws or _differ(before, states(CPU))
            loss.backward()
        losses.append(loss.item())
        gradients.append(_gradients(model, own))
        if plan.train.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(module_tree.parameters(model), plan.train.grad_clip)
        for optimizer, lr in optimizers.values():
            optimizer.param_groups[0]["lr"] = lr * learning_rate_factor(plan, step)
            optimizer.step()
        parameters.append(_values(model, own))
    return Trajectory(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        optimizer_steps=steps,
        frozen=frozenset(frozen),
        draws=draws,
        mixes=_mixing(model, kept),
        no_mean=no_mean,
        computed_in=frozenset(seen.dtypes),
    )


class _Dtypes(TorchDispatchMode):
    """Collects the dtypes of operations' results, after autocast's casts."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.dtypes.update(t.dtype for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def serve_signals_(model: nn.Module) -> None:
    """Add hooks that let Python handle signals within a backward, which may take minutes."""
    for parameter in module_tree.parameters(model):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: None)


def _differ(before: Tensors, after: Tensors) -> bool:
    return any(not torch.equal(state, after[name]) for name, state in before.items())


def _mixing(model: nn.Module, before: Tensors) -> str:
    """Return `Trajectory.mixes`; `before` are the buffers before the first step."""
    for name, module in module_tree.named_modules(model):
        if isinstance(module, BatchNorms) and module.training:
            return name or type(module).__name__
    after = dict(module_tree.named_buffers(model))
    changed = (name for name, buffer in before.items() if not torch.equal(buffer, after[name]))
    return next(changed, "")


def _mean_loss(output: Any) -> Tensor:
    pair = pair_in(output)
    if pair is None:
        return loss_in(output)
    return pair[0] / (pair[1] or 1)  # a step may have no target at all


def _has_targets(batch: Tensors, ignored: int | None) -> bool:
    """Whether a batch has labels that may count; those of first tokens may not."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return True
    return ignored is None or bool((labels[..., 1:] != ignored).any())


def _freeze(model: nn.Module, plan: FreezePlan, *, step: int) -> set[str]:
    frozen = set()
    trained = [*plan.exceptions]
    for begin, globs in plan.unfreeze.items():
        trained += globs if begin <= step else ()
    for name, parameter in module_tree.named_parameters(model):
        names = [
            n
            for n, p in module_tree.named_parameters(model, remove_duplicate=False)
            if p is parameter
        ]

        def named(globs: Sequence[str], names: list[str] = names) -> bool:
            return any(fnmatch.filter(names, glob) for glob in globs)

        if named(trained):
            parameter.requires_grad = True
        elif named(plan.patterns):
            parameter.requires_grad = False
        if not parameter.requires_grad:
            frozen.add(name)
    return frozen


def _add_to(optimizers: Optimizers, model: nn.Module, plan: RunPlan) -> None:
    """Add an optimizer, with its learning rate, for every newly trained parameter."""
    undecayed = names_without_decay(model)
    for name, parameter in module_tree.named_parameters(model):
        if parameter.requires_grad and name not in optimizers:
            made = optimizer_of(name, parameter, plan.optim, undecayed)
            optimizers[name] = made, made.param_groups[0]["lr"]


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


def _gradients(model: nn.Module, own: dict[str, torch.dtype]) -> Tensors:
    grads = {n: p.grad for n, p in module_tree.named_parameters(model) if p.grad is not None}
    return {name: grad.to(own[name], copy=True) for name, grad in grads.items()}


def _values(model: nn.Module, own: dict[str, torch.dtype]) -> Tensors:
    return {n: p.detach().to(own[n], copy=True) for n, p in module_tree.named_parameters(model)}
