"""The reference: one process, plain torch, the whole global batch at once.

It computes in float64 where the model allows it, because in float32 its own rounding may be larger
than that of the plugins, which sum in smaller pieces; and once more in the model's own dtype, to
measure that rounding. It shares with colotrain's engine the code that reads its samples, and no
code that is verified: no initial values, accumulation, freezing, sharding, clipping or optimizer
code.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.prepare.prepared import Split
from colotrain.data.read.loader import (
    count_evaluated,
    open_samples,
    planned_collate,
    planned_draw_seed,
    planned_order,
    read_batch,
)
from colotrain.dotted import described, import_target
from colotrain.engine.step.evaluation import RESERVED
from colotrain.engine.step.loss_trial import MOST_SAMPLES, examine
from colotrain.errors import ColotrainError
from colotrain.generators import seeded, states
from colotrain.models.loading import begin_training_
from colotrain.models.objective import attach_, inputs_of, output_of, outputs_alone
from colotrain.models.outputs import loss_in, metrics_in, pair_in
from colotrain.spec.plan import FreezePlan, RunPlan
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.survey import ParameterInfo
from colotrain.torch_internals import (
    BatchNorms,
    TorchDispatchMode,
    tree_leaves,
)
from colotrain.verify.masks import MaskedSamples, without_dropout
from colotrain.verify.objectives import objective_of
from colotrain.verify.optimizers import Optimizers, add_to_, learning_rate_factor
from colotrain.verify.plain_models import build_plain
from colotrain.verify.trajectory import Tensors, Trajectory

CPU = torch.device("cpu")


def min_bytes(parameters: Sequence[ParameterInfo], *, steps: int) -> int:
    """Least memory of the reference: the model in float64, and its values after each step."""
    values = sum(parameter.numel * parameter.itemsize for parameter in parameters)
    return 8 * sum(parameter.numel for parameter in parameters) + 2 * (steps + 1) * values


def run_reference(plan: RunPlan, *, steps: int) -> Trajectory:
    """Train the plan's model for `steps` steps in this process.

    Values are in the model's own dtypes. A model that cannot run in float64 (its forward makes
    float32 tensors, say) runs as it is. `ColotrainError` where it does not run at all.
    """
    try:
        plain = _train(plan, steps=steps, dtype=None)
    except Exception as error:
        problem = f"the reference, one process of plain torch, failed: {described(error)}"
        raise ColotrainError(problem, "correct the model") from error
    try:
        exact = _train(plan, steps=steps, dtype=torch.float64)
    except Exception as error:
        return replace(plain, not_exact=described(error))
    rounding = {
        "gradients": list(map(_distances, exact.gradients, plain.gradients)),
        "parameters": list(map(_distances, exact.parameters, plain.parameters)),
    }
    return replace(exact, rounding=rounding, computed_in=plain.computed_in, no_mean=plain.no_mean)


def along(plan: RunPlan, reference: Trajectory, found: Trajectory) -> Trajectory:
    """The reference step by step: from a case's own parameters, with its own gradients.

    AdamW divides a gradient by its size: where one is as small as rounding, far within the limit of
    gradients, rounding becomes a part of a whole step, and the next gradient is that of other
    parameters. So each step's loss and gradients are those of the case's parameters, and each
    update is that of its gradients; the optimizer's state is the reference's own.

    Where parameters are cast to half precision, the rounding of gradients is that of the same
    computation in half precision: the one in the model's own dtypes, float32, has none of it. No
    more of it counts than the precision's tolerance: sums over many tokens lose more there than in
    a run, which adds in float32 and scales its loss, and a wrong gradient must not pass for them.
    """
    follow = functools.partial(_train, plan, steps=len(found.losses), given=found)
    alone, gradients = follow(dtype=torch.float64), reference.rounding.get("gradients", [])
    precision = PRECISIONS[plan.train.precision]
    if precision.is_cast:
        with contextlib.suppress(Exception):  # a model that half precision alone is not for
            cast = follow(dtype=getattr(torch, precision.dtype))
            bounded = functools.partial(_bounded_distances, share=precision.tolerance)
            gradients = list(map(bounded, alone.gradients, cast.gradients))
    return replace(alone, rounding={"gradients": gradients}, computed_in=reference.computed_in)


def _bounded_distances(wanted: Tensors, found: Tensors, *, share: float) -> dict[str, float]:
    """Distances up to a share of the largest value, without those of values that overflowed."""
    of_all = _distances(wanted, found).items()
    return {n: min(off, share * max_abs(wanted[n])) for n, off in of_all if math.isfinite(off)}


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


def _train(
    plan: RunPlan, *, steps: int, dtype: torch.dtype | None, given: Trajectory | None = None
) -> Trajectory:
    """Train the model in its own dtypes, or in `dtype`; `given` is what `along` follows."""
    model = build_plain(plan.model, seed=plan.train.seed)
    attach_(model, plan.model)
    frozen = _freeze(model, plan.freeze, step=0)
    own = {name: p.dtype for name, p in module_tree.named_parameters(model)}
    if dtype is not None:
        _cast_(model, dtype)
    begin_training_(model)
    serve_signals_(model)
    objective, batches = objective_of(plan, dtype), _Batches(plan, dtype)
    draws, seen = False, _Dtypes()
    kept = {name: buffer.clone() for name, buffer in module_tree.named_buffers(model)}
    optimizers: Optimizers = {}
    add_to_(optimizers, model, plan, own)
    losses, gradients, parameters, no_mean = [], [], [_values(model, own)], ""
    if dtype is None and objective is None:
        no_mean = examine(model, batches.unmasked(min(MOST_SAMPLES, batches.size))).against
    for step in range(steps):
        if step in plan.freeze.unfreeze:
            frozen = _freeze(model, plan.freeze, step=step)
            add_to_(optimizers, model, plan, own)
        batch = batches.of(step)
        model.zero_grad(set_to_none=True)
        before = states(CPU)
        with without_dropout(model):
            with seen:
                if objective is not None:
                    loss = objective.mean_loss(model, batch)
                else:
                    loss = _own_mean_loss(model, batch, plan.train.ignore_index)
            draws = draws or _differ(before, states(CPU))
            loss.backward()
        losses.append(loss.item())
        gradients.append(_gradients(model, own))
        if given is not None:
            _set_gradients(model, given.gradients[step])
        _update(plan, model, optimizers, step)
        parameters.append(_values(model, own))
        if given is not None:
            _set_parameters(model, given.parameters[step + 1])
    return Trajectory(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        optimizer_steps=steps,
        frozen=frozenset(frozen),
        draws=draws,
        mixes=(mixes := _mixing(model, kept)),
        evaluation={}
        if mixes or objective is not None
        else _evaluate(plan, _as_evaluated(model, optimizers), dtype),
        no_mean=no_mean,
        computed_in=frozenset(seen.dtypes),
    )


@torch.no_grad()
def _as_evaluated(model: nn.Module, optimizers: Optimizers) -> nn.Module:
    """Give each parameter the mean that its optimizer keeps of it, if any; training is over."""
    for name, parameter in module_tree.named_parameters(model):
        state = optimizers[name][0].state.get(parameter, {}) if name in optimizers else {}
        parameter.copy_(state.get("x", parameter))
    return model


@torch.no_grad()
def _evaluate(plan: RunPlan, model: nn.Module, dtype: torch.dtype | None) -> dict[str, float]:
    """Loss and metrics of the validation samples, all at once; empty where there are none.

    Metrics are left out in half precision, where one that counts may count otherwise.
    """
    batches = _Batches(plan, dtype, split="validation")
    if not plan.train.eval_steps or not len(batches.samples.samples):
        return {}
    batch = batches.unmasked(count_evaluated(batches.samples.samples, plan))
    model.eval()
    found, output = {}, output_of(model, batch)
    for values in (output, _metrics(plan, model, batch)) if plan.train.precision == "fp32" else ():
        for name, total, count in metrics_in(values, torch.ones(())):
            found[name] = total.item() / (count.item() or 1.0)
    return found | {RESERVED: _mean_loss(output).item()}


def _metrics(plan: RunPlan, model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """What `train.metrics` returns; None where there is none, and where it fails in float64."""
    if (dotted := plan.train.metrics) is None:
        return None
    if plan.model.hf and plan.model.loss is None:
        outputs = outputs_alone(model, batch)
    else:
        outputs = model(**inputs_of(model, batch))
    try:
        return import_target("train.metrics", dotted)(batch, outputs)
    except Exception:  # it runs in the workers, whose dtypes it is made for
        return None


class _Batches:
    """The global batches of a run, with floating-point tensors in `dtype` if there is one."""

    def __init__(self, plan: RunPlan, dtype: torch.dtype | None, split: Split = "train") -> None:
        with seeded(plan.train.seed):
            opened = open_samples(plan.data, split)
            ignored = plan.train.ignore_index
            self.samples = MaskedSamples(opened, whole=bool(plan.data.rows), ignored=ignored)
        self.plan, self.split, self.size = plan, split, plan.batch.global_batch
        drawn, collate = planned_draw_seed(opened, plan), planned_collate(plan.data)
        self.read = functools.partial(read_batch, draw_seed=drawn, collate=collate)
        self.dtype = dtype

    @functools.cached_property
    def order(self) -> Any:
        return planned_order(self.samples.samples, self.plan, self.split)

    def of(self, step: int) -> dict[str, Tensor]:
        positions = range(step * self.size, (step + 1) * self.size)
        batch = self.read(self.samples, self.order, positions)
        return batch if self.dtype is None else _converted(batch, self.dtype)

    def unmasked(self, num: int) -> dict[str, Tensor]:
        """The first samples without the reference's masks."""
        batch = self.read(self.samples.samples, self.order, range(num))
        return batch if self.dtype is None else _converted(batch, self.dtype)


def _set_gradients(model: nn.Module, gradients: Tensors) -> None:
    for name, parameter in module_tree.named_parameters(model):
        own = gradients.get(name)
        parameter.grad = None if own is None else own.to(parameter.dtype, copy=True)  # is clipped


def _set_parameters(model: nn.Module, values: Tensors) -> None:
    for name, parameter in module_tree.named_parameters(model):
        parameter.data.copy_(values[name])


def _update(plan: RunPlan, model: nn.Module, optimizers: Optimizers, step: int) -> None:
    if (most := plan.train.grad_clip) is not None:
        torch.nn.utils.clip_grad_norm_(module_tree.parameters(model), most)
    for optimizer, lr in optimizers.values():
        optimizer.param_groups[0]["lr"] = lr * learning_rate_factor(plan, step)
        optimizer.step()


def _cast_(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the model's floating-point tensors this dtype; complex ones the widest."""
    for tensor in (*module_tree.parameters(model), *module_tree.buffers(model)):
        tensor.data = _in(tensor.data, dtype)


def _converted(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch with its floating-point tensors in this dtype, and complex ones in the widest."""
    return {name: _in(tensor, dtype) for name, tensor in batch.items()}


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return widened(tensor)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _own_mean_loss(model: nn.Module, batch: dict[str, Tensor], ignored: int | None) -> Tensor:
    """The model's mean loss of a batch; 0 where it has no target, of which the mean is NaN."""
    loss = _mean_loss(output_of(model, batch))
    if loss.isnan() and not _has_targets(batch, ignored):
        labels = torch.full_like(batch["labels"], int(ignored == 0))
        return 0.0 * _mean_loss(output_of(model, {**batch, "labels": labels}))
    return loss


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
    trained = [*plan.except_]
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


def _gradients(model: nn.Module, own: dict[str, torch.dtype]) -> Tensors:
    grads = {n: p.grad for n, p in module_tree.named_parameters(model) if p.grad is not None}
    return {name: grad.to(own[name], copy=True) for name, grad in grads.items()}


def _values(model: nn.Module, own: dict[str, torch.dtype]) -> Tensors:
    return {n: p.detach().to(own[n], copy=True) for n, p in module_tree.named_parameters(model)}
