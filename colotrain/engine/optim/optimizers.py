"""The optimizers by name, and what part of a sharded parameter each one sees.

Elementwise optimizers (adamw, sgd, lion) work on local shards. muon gathers its matrices, and
adafactor sums its moments over ranks. A user's own optimizer gets DTensors, on which torch's
operations mean the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from colotrain.dotted import import_target
from colotrain.errors import ConfigError, Problem
from colotrain.spec.optimizers import OPTIMIZERS
from colotrain.spec.plan import OptimPlan
from colotrain.torch_internals import interpolate, interpolate_, multiply_, signs_, subtract_

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al. 2024), as in torch's Muon."""
NEWTON_SCHULZ_STEPS = 5
MUON_EPS = 1e-7


class Layout(Protocol):
    """Relation between this rank's part of a parameter and the whole parameter."""

    def gather(self, shard: nn.Parameter, value: Tensor) -> Tensor:
        """Concatenate `value` of every rank (collective)."""
        ...

    def own_rows(self, shard: nn.Parameter, whole: Tensor) -> Tensor: ...

    def num_rows(self, shard: nn.Parameter) -> int | None:
        """Return the rows of the whole parameter; None where this rank has all of it."""
        ...

    def sum_(self, values: Tensor) -> None:
        """Sum `values` in place over the ranks that share one copy of the model (collective)."""
        ...


def make(plan: OptimPlan, groups: list[dict[str, Any]], layout: Layout) -> torch.optim.Optimizer:
    """Make the plan's optimizer over parameter groups, each with its own weight decay."""
    if plan.name == "sgd":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.betas[0], fused=True)
    if plan.name == "adafactor":
        return Adafactor(groups, lr=plan.lr, layout=layout)
    if plan.name in OPTIMIZERS:
        betas = (plan.betas[0], plan.betas[1])
        if plan.name == "adamw":
            return torch.optim.AdamW(groups, lr=plan.lr, betas=betas, eps=plan.eps, fused=True)
        if plan.name == "lion":
            return Lion(groups, lr=plan.lr, betas=betas)
        return Muon(groups, lr=plan.lr, betas=betas, eps=plan.eps, layout=layout)
    return _make_custom(plan, groups)


def needs_loops(optimizer: str, name: str, shard: Tensor) -> bool:
    """Whether torch's fused kernels cannot update a parameter.

    They refuse complex numbers. The fused SGD loses updates in half precision on the CPU: seen with
    torch 2.13, in tensors of more than a few elements most do not change.
    """
    if shard.is_complex():
        if optimizer in ("lion", "muon", "adafactor"):
            expected = f"adamw or sgd, or an optimizer of your own ({name} has complex numbers)"
            raise ConfigError([Problem(key="optim.name", value=optimizer, expected=expected)])
        return optimizer in OPTIMIZERS
    halves = shard.device.type == "cpu" and shard.dtype in (torch.bfloat16, torch.float16)
    return halves and optimizer == "sgd"


def _make_custom(plan: OptimPlan, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    target = import_target("optim.name", plan.name)
    try:
        made = target(groups, lr=plan.lr, **plan.args)
    except (TypeError, ValueError) as error:
        fix = "correct optim.args, or name another optimizer"
        expected = f"arguments that {plan.name} takes ({error})"
        problem = Problem(key="optim.args", value=plan.args, expected=expected, fix=fix)
        raise ConfigError([problem]) from error
    if not isinstance(made, torch.optim.Optimizer):
        expected = f"a torch.optim.Optimizer, not {type(made).__name__}"
        raise ConfigError([Problem(key="optim.name", value=plan.name, expected=expected)])
    return made


class Lion(torch.optim.Optimizer):
    """Sign of interpolated momentum, with decoupled weight decay (Chen et al. 2023)."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameters, grads, states in _batches(self, group):
                for parameter, state in zip(parameters, states, strict=True):
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                averages = [state["exp_avg"] for state in states]
                multiply_([*parameters], 1 - group["lr"] * group["weight_decay"])
                signs_(updates := interpolate(averages, grads, 1 - beta1))
                subtract_([*parameters], updates, alpha=group["lr"])
                interpolate_(averages, grads, 1 - beta2)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024) for groups with `muon`, AdamW for the others.

    Momentum is sharded like the parameter. Every rank gathers each matrix for the iteration and
    keeps its own rows of the result. Steps are scaled to AdamW's size (0.2 √ of the larger side;
    Liu et al. 2025), so that one learning rate serves both. All ranks must step alike.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        layout: Layout,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "muon": False})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            if group["muon"]:
                for batch in _batches(self, group):
                    self._orthogonal(*batch, group)
            else:
                self._adamw(group)

    def _orthogonal(
        self,
        parameters: list[nn.Parameter],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        group: dict[str, Any],
    ) -> None:
        """torch.optim.Muon's update, Nesterov momentum included."""
        momentum = group["betas"][1]
        for grad, state in zip(grads, states, strict=True):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [state["momentum_buffer"] for state in states]
        interpolate_(buffers, grads, 1 - momentum)
        directions = interpolate(grads, buffers, momentum)
        multiply_([*parameters], 1 - group["lr"] * group["weight_decay"])
        for parameter, direction in zip(parameters, directions, strict=True):
            whole = self.layout.gather(parameter, direction)
            update = self.layout.own_rows(parameter, orthogonalise(whole))
            scale = 0.2 * math.sqrt(max(whole.shape))
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        found = list(_with_gradients(self, group))
        for parameter, _, state in found:
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if found:
            beta1, beta2 = group["betas"]
            adamw(
                [parameter for parameter, _, _ in found],
                [grad for _, grad, _ in found],
                [state["exp_avg"] for *_, state in found],
                [state["exp_avg_sq"] for *_, state in found],
                [],
                [state["step"] for *_, state in found],
                foreach=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer and Stern 2018) over shards of rows.

    A matrix's second moments are kept per row, where a rank has those of its own rows, and per
    column, where they are sums over all ranks and the same on each. All ranks must step alike.
    """

    BETA2_DECAY, EPS, LARGEST_RMS = -0.8, 1e-3, 1.0

    def __init__(
        self, params: Any, *, lr: float, layout: Layout, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            found = list(_with_gradients(self, group))
            if not found:
                continue
            sums = [self._moments(parameter, grad, state) for parameter, grad, state in found]
            self._total([p for p, *_ in found], [tensor for part in sums for tensor in part], 3)
            updates = [
                self._direction(p, grad, state, part)
                for (p, grad, state), part in zip(found, sums, strict=True)
            ]
            squares = [update.double().square().sum().reshape(1) for update in updates]
            self._total([p for p, *_ in found], squares, 1)
            for (p, _, state), update, part, square in zip(
                found, updates, sums, squares, strict=True
            ):
                self._apply(p, update, group, state, part[0], square)

    def _moments(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update this rank's state; returns its part of Σ p², Σ row moments, Σ over rows of g²."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if grad.ndim > 1:
                state["row_var"] = torch.zeros_like(grad[..., :1])
                state["col_var"] = grad.new_zeros((*self._leading(grad), 1, grad.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(grad)
        state["step"] += 1
        norm = parameter.double().square().sum().reshape(1)
        nothing = norm.new_zeros(0)
        if grad.ndim < 2:
            state["variance"].lerp_(grad.square(), self._weight(state))
            return norm, nothing, nothing
        state["row_var"].lerp_(grad.square().mean(-1, keepdim=True), self._weight(state))
        columns = grad.double().square().sum(-2).flatten()
        return norm, state["row_var"].double().sum(-2).flatten(), columns

    @staticmethod
    def _leading(grad: Tensor) -> tuple[int, ...]:
        """Return the dimensions before the matrix; if there are any, the first one is sharded."""
        return tuple(grad.shape[:-2])

    def _weight(self, state: dict[str, Any]) -> float:
        return float(state["step"].item() ** self.BETA2_DECAY)

    def _total(self, parameters: list[nn.Parameter], parts: list[Tensor], each: int) -> None:
        """Sum `parts`, `each` per parameter, over the ranks, in one collective.

        Parts that are complete on this rank stay as they are (unsharded, or of its own rows).
        """
        shared = []
        for index, part in enumerate(parts):
            parameter = parameters[index // each]
            within = index % each > 0 and parameter.ndim > 2
            if self.layout.num_rows(parameter) is not None and not within:
                shared.append(part)
        if shared:
            flat = torch.cat(shared)
            self.layout.sum_(flat)
            for part, total in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
                part.copy_(total)

    def _direction(
        self,
        parameter: nn.Parameter,
        grad: Tensor,
        state: dict[str, Any],
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Return the gradient divided by the root of its estimated second moment."""
        tiny = torch.finfo(parameter.dtype).eps
        if grad.ndim < 2:
            estimate = state["variance"].clone()
        else:
            rows = grad.shape[-2]
            if grad.ndim == 2:
                rows = self.layout.num_rows(parameter) or rows
            _, row_sum, columns = sums
            shape = state["col_var"].shape
            state["col_var"].lerp_((columns / rows).view(shape).to(grad.dtype), self._weight(state))
            mean = (row_sum / rows).view(*shape[:-1], 1).to(grad.dtype)
            estimate = state["row_var"] @ state["col_var"] / mean.clamp(min=tiny)
        return estimate.clamp_(min=tiny * tiny).rsqrt_().mul_(grad)

    def _apply(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        norm: Tensor,
        square: Tensor,
    ) -> None:
        rows = self.layout.num_rows(parameter)
        numel = max(1, parameter.numel())  # a rank may hold no row
        if rows is not None:
            numel = rows * math.prod(parameter.shape[1:])
        rate = (norm / numel).sqrt().clamp(min=self.EPS)  # on the device: the host need not wait
        rate *= min(group["lr"], state["step"].item() ** -0.5)
        rate /= ((square / numel).sqrt() / self.LARGEST_RMS).clamp(min=1.0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.mul_(rate.squeeze(0)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of `matrix` = U Σ Vᵀ, approximately, in bfloat16 as torch.optim.Muon does."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=MUON_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _with_gradients(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
    for parameter in group["params"]:
        if parameter.grad is not None:
            yield parameter, parameter.grad, optimizer.state[parameter]


def _batches(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[list[nn.Parameter], list[Tensor], list[dict[str, Any]]]]:
    """Yield parameters, gradients and states that are updated together, in few launches on a GPU.

    A batch is no larger than the largest parameter, so that updating it needs no more memory.
    """
    found = list(_with_gradients(optimizer, group))
    most = max((grad.numel() for _, grad, _ in found), default=0)
    batch: list[tuple[nn.Parameter, Tensor, dict[str, Any]]] = []
    size = 0
    for entry in found:
        if batch and size + entry[1].numel() > most:
            yield _columns(batch)
            batch, size = [], 0
        batch.append(entry)
        size += entry[1].numel()
    if batch:
        yield _columns(batch)


def _columns(
    rows: list[tuple[nn.Parameter, Tensor, dict[str, Any]]],
) -> tuple[list[nn.Parameter], list[Tensor], list[dict[str, Any]]]:
    parameters, grads, states = zip(*rows, strict=True)
    return list(parameters), list(grads), list(states)


def to_checkpoint_layout(value: Tensor) -> Tensor | None:
    """Return optimizer state as a checkpoint keeps it: a shard stays a DTensor, a replica is plain.

    It shares memory with `value`. None for any other layout.
    """
    if not isinstance(value, DTensor):
        return value
    *outer, inner = value.placements
    if not all(placement.is_replicate() for placement in outer):
        return None
    if inner.is_replicate():
        return value.to_local()
    return value if inner.is_shard(0) else None
