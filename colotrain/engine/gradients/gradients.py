"""Gradients, readable by name under every plugin.

`read(model)` yields one `GradView` per parameter, from the last backward of a step until the next
step's first backward. Values are those of the accumulated, averaged, unscaled gradient before
clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.freezing import names_of
from colotrain.engine.sharding.fsdp_internals import name_of, unsharded_of
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.sharding.shards import begin_of, local_shard
from colotrain.errors import ColotrainError
from colotrain.torch_internals import norms_of

Status = Literal["trained", "frozen", "unused", "zero", "nonfinite"]


@dataclass(slots=True, kw_only=True)
class GradientState:
    """What `read` needs beside the gradients themselves."""

    sharded: ShardedModel
    frozen: dict[str, str]
    """Frozen parameter → the pattern that froze it."""
    factor: float = 1.0
    """Factor by which a stored gradient becomes the gradient of the step."""
    norm: float = 0.0
    """Global norm before clipping."""
    clip_ratio: float = 1.0
    """Factor by which clipping multiplied the gradients."""
    names: tuple[str, ...] = ()
    """Names of all parameters, in the order of the model."""
    used_here: set[str] = field(default_factory=set)
    """Parameters that a backward of this step reached on this rank."""
    used: set[str] = field(default_factory=set)
    """Parameters that a backward of this step reached on any rank."""
    norms: dict[str, float] = field(default_factory=dict)
    """Parameter → norm of its whole gradient."""
    watched: set[str] = field(default_factory=set)
    """Parameters with a hook that adds them to `used_here`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradView:
    """The gradient of one parameter in the last step."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same (tied) parameter."""
    shape: tuple[int, ...]
    """Shape of the whole gradient."""
    dtype: torch.dtype
    device: torch.device
    begin: tuple[int, ...]
    """Index of the first element that this rank holds; its part has the shape of `local`."""
    status: Status
    reason: str | None
    """Pattern that froze it, or why it has no usable gradient; None when it is trained."""
    norm: float
    """Norm of the whole gradient."""
    _stored: Tensor | None
    _state: GradientState

    @property
    def offset(self) -> int:
        """First row of dimension 0 that this rank holds."""
        return self.begin[0] if self.begin else 0

    @property
    def local(self) -> Tensor | None:
        """This rank's rows of the gradient; None where there is none, or on another stage."""
        return None if self._stored is None else local_shard(self._stored) * self._state.factor

    def full(self) -> Tensor:
        """Return the whole gradient, on every rank; zeros for a parameter that has none.

        Collective: all ranks must call for the same parameters in the same order.
        """
        sharded, stored = self._state.sharded, self._stored
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.name not in self._state.used:
            return whole
        if stored is not None:
            rows = stored.full_tensor() if isinstance(stored, DTensor) else stored
            whole = sharded.parts.join(self.name, rows)
        return sharded.stage.from_holder(self.name, whole) * self._state.factor


_STATE = "_colotrain_gradients"
"""Attribute of a model that holds its GradientState."""


def watch(sharded: ShardedModel, *, frozen: dict[str, str]) -> GradientState:
    """Make the gradients of `sharded` readable by `read(sharded.module)`."""
    names = tuple(name for name, _ in module_tree.named_parameters(sharded.module))
    state = GradientState(sharded=sharded, frozen=frozen, names=names)
    sharded.module.__dict__[_STATE] = state
    return state


def read(model: nn.Module) -> Iterator[GradView]:
    """Yield one view per parameter, in the order of the model; tied parameters once."""
    state = model.__dict__.get(_STATE)
    if state is None:
        raise ColotrainError(
            "gradients can be read of a model that colotrain shards only", "use on_gradients"
        )
    known_as, parts = names_of(model), state.sharded.parts
    for name, parameter in module_tree.named_parameters(model):
        yield GradView(
            name=name,
            aliases=tuple(known_as[parameter][1:]),
            shape=parts.whole_shape(name, parameter.shape),
            dtype=parameter.dtype,
            device=state.sharded.device_of(parameter),
            begin=begin_of(name, parameter, parts),
            status=(found := _status(name, state))[0],
            reason=found[1],
            norm=state.norms.get(name, 0.0),
            _stored=parameter.grad,
            _state=state,
        )


def _status(name: str, state: GradientState) -> tuple[Status, str | None]:
    norm = state.norms.get(name, 0.0)
    if name in state.frozen:
        return "frozen", state.frozen[name]
    if name not in state.used:
        return "unused", "no path from the loss"
    if not math.isfinite(norm):
        return "nonfinite", f"its norm is {norm}"
    if norm == 0.0:
        return "zero", "every element is zero"
    return "trained", None


def note_use(state: GradientState) -> None:
    """Register hooks that add trainable parameters to `used_here` when a backward reaches them.

    Call it between each forward and its backward: the whole parameters, on which autograd works,
    exist from a group's first forward on.
    """
    sharded = state.sharded
    if all(
        n in state.watched or n in state.frozen or not sharded.stage.holds(n) for n in state.names
    ):
        return
    for name, parameter in unsharded_parameters(state):
        if name not in state.watched:
            _note(state, name, parameter)


def unsharded_parameters(state: GradientState) -> Iterator[tuple[str, Tensor]]:
    """Yield the trainable tensors on which autograd works, as far as they exist yet."""
    found = {
        name: parameter
        for name, parameter in state.sharded.named_parameters()
        if not isinstance(parameter, DTensor)
    }
    for param in state.sharded.fsdp_params():
        if (whole := unsharded_of(param)) is not None:
            found[name_of(param)] = whole
    yield from ((name, whole) for name, whole in found.items() if whole.requires_grad)


def _note(state: GradientState, name: str, parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(lambda _: state.used_here.add(name))
    state.watched.add(name)


def local_statistics(state: GradientState, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return Σ g² of each stored shard, and whether each parameter was used: float64 [names] each.

    The squares are on `device`, so that the host need not wait for a GPU; the flags are on the CPU.
    Summed over all ranks they describe the whole gradients: ranks that hold replicas give zeros.
    """
    shards = {
        i: shard
        for i, p in enumerate(_parameters(state))
        if (shard := counted(state, state.names[i], p, p.grad)) is not None
    }
    known = state.sharded.norms
    norms_of = {i: known[state.names[i]] for i in shards if state.names[i] in known}
    rest = [i for i in shards if i not in norms_of]
    if rest:
        norms_of |= zip(rest, norms([shards[i] for i in rest]), strict=True)
    used = torch.tensor([name in state.used_here for name in state.names], dtype=torch.float64)
    squares = torch.zeros(len(state.names), dtype=torch.float64, device=device)
    for where in {norm.device for norm in norms_of.values()}:
        blank = torch.zeros((), device=where)
        here = {i: norm for i, norm in norms_of.items() if norm.device == where}
        each = [here.get(i, blank) for i in range(len(state.names))]
        if len({norm.dtype for norm in each}) > 1:
            each = [norm.double() for norm in each]
        squares += to_device(torch.stack(each).double().square(), device)
    return squares, used


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` without making the host wait for a GPU."""
    if values.device.type != "cpu" or device.type == "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def norms(tensors: list[Tensor], *, order: float = 2.0) -> list[Tensor]:
    """Return the norm of each; in fp32 for 16-bit and smaller floats, whose squares overflow."""
    found: list[Tensor] = [torch.empty(0)] * len(tensors)
    for narrow in (False, True):
        chosen = [i for i, t in enumerate(tensors) if (t.dtype.itemsize < 4) == narrow]
        dtype = torch.float32 if narrow else None
        if chosen:
            measured = norms_of([tensors[i] for i in chosen], ord=order, dtype=dtype)
            for index, norm in zip(chosen, measured, strict=True):
                found[index] = norm
    return found


def _parameters(state: GradientState) -> list[nn.Parameter]:
    return list(module_tree.parameters(state.sharded.module))


def counted(
    state: GradientState, name: str, parameter: nn.Parameter, value: Tensor | None
) -> Tensor | None:
    """Return the part of `value` (laid out like `parameter`) that this rank adds to a global sum.

    None where it adds none: of ranks that hold the same one counts, and the first of a stage for
    parameters that are not sharded.
    """
    if value is None:
        return None
    if isinstance(parameter, DTensor):
        shard = local_shard(value)
        return shard if shard.numel() and state.sharded.counts_here(name) else None
    stage = state.sharded.stage
    counts = value.numel() and stage.is_first_rank and stage.counts(name)
    return value if counts and not value.is_meta else None


def store_statistics_(state: GradientState, summed: Tensor, *, factor: float) -> None:
    """Store what the sum of `local_statistics` over all ranks says; `factor` as in `GradientState`.

    A parameter that no backward reached on any rank gets no gradient, as in plain torch.
    """
    squares, used = summed.cpu().chunk(2)
    state.factor, state.clip_ratio = factor, 1.0
    state.norms = {
        name: math.sqrt(square) * factor if square >= 0 else math.nan
        for name, square in zip(state.names, squares.tolist(), strict=True)
    }
    state.used = {name for name, n in zip(state.names, used.tolist(), strict=True) if n}
    total = squares.sum().item()
    state.norm = math.sqrt(total) * factor if total >= 0 else math.nan
    drop_unused_(state)


def drop_unused_(state: GradientState) -> None:
    """Drop gradients that no backward of the step made: collectives fill them with zeros."""
    for name, parameter in module_tree.named_parameters(state.sharded.module):
        if name not in state.used:
            parameter.grad = None
    state.used_here.clear()


def clip_ratio(norm: float, limit: float | None) -> float:
    """Return the factor that brings gradients of global norm `norm` down to at most `limit`."""
    if limit is None or norm <= limit or norm == 0.0:
        return 1.0
    return limit / norm


def clear_(model: nn.Module) -> None:
    """Drop the gradients of the last step."""
    for parameter in module_tree.parameters(model):
        parameter.grad = None
