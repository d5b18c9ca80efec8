"""Gradients, readable by name under every plugin.

`read(model)` yields one `GradView` per parameter, from the last backward of a step until the next
step's first backward. Values are those of the accumulated, averaged, unscaled gradient before
clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.model.freezing import names_of
from colotrain.engine.parts.part_map import Part, local_part
from colotrain.engine.parts.wholes import gather_whole
from colotrain.engine.sharding.fsdp_internals import name_of, unsharded_of
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.errors import ColotrainError
from colotrain.models.facts import facts_of
from colotrain.torch_internals import norms_of

Status = Literal["trained", "frozen", "unused", "zero", "nonfinite"]


@dataclass(slots=True, kw_only=True)
class GradientState:
    """What `read` needs beside the gradients themselves."""

    sharded: ShardedModel
    factor: float = 1.0
    """Factor by which a stored gradient becomes the gradient of the step."""
    norm: float = 0.0
    """Global norm before clipping."""
    clip_ratio: float = 1.0
    """Factor by which clipping multiplied the gradients."""
    used_here: set[str] = field(default_factory=set)
    """Parameters that a backward of this step reached on this rank."""
    used: set[str] = field(default_factory=set)
    """Parameters that a backward of this step reached on any rank."""
    norms: dict[str, float] = field(default_factory=dict)
    """Parameter → norm of its whole gradient."""
    watched: set[str] = field(default_factory=set)
    """Parameters with a hook that adds them to `used_here`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of the model."""
        return tuple(self.sharded.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradView:
    """The gradient of one parameter in the last step."""

    part: Part
    """What this rank has of it."""
    aliases: tuple[str, ...]
    """Other names of the same (tied) parameter."""
    dtype: torch.dtype
    device: torch.device
    status: Status
    reason: str | None
    """Pattern that froze it, or why it has no usable gradient; None when it is trained."""
    norm: float
    """Norm of the whole gradient."""
    _stored: Tensor | None
    _state: GradientState

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole gradient."""
        return self.part.whole

    @property
    def begin(self) -> tuple[int, ...]:
        """Index of the first element that this rank holds; its part has the shape of `local`."""
        return self.part.begin

    @property
    def offset(self) -> int:
        """First row of dimension 0 that this rank holds."""
        return self.begin[0] if self.begin else 0

    @property
    def local(self) -> Tensor | None:
        """This rank's rows of the gradient; None where there is none, or on another stage."""
        return None if self._stored is None else local_part(self._stored) * self._state.factor

    def full(self) -> Tensor:
        """Return the whole gradient, on every rank; zeros for a parameter that has none.

        Collective: all ranks must call for the same parameters in the same order.
        """
        blank = partial(torch.zeros, dtype=self.dtype, device=self.device)
        if self.name not in self._state.used:
            return blank(self.shape)
        local = blank(self.part.sizes) if self._stored is None else local_part(self._stored)
        whole = gather_whole(self.part, local, self._state.sharded.comms)
        return whole * self._state.factor


def watch(sharded: ShardedModel) -> GradientState:
    """Make the gradients of `sharded` readable by `read(sharded.module)`."""
    state = GradientState(sharded=sharded)
    facts_of(sharded.module).gradients = state
    return state


def read(model: nn.Module) -> Iterator[GradView]:
    """Yield one view per parameter, in the order of the model; tied parameters once."""
    state: GradientState | None = facts_of(model).gradients
    if state is None:
        raise ColotrainError(
            "gradients can be read of a model that colotrain shards only", "use on_gradients"
        )
    known_as, parts = names_of(model), state.sharded.parts
    for name, parameter in module_tree.named_parameters(model):
        yield GradView(
            part=parts[name],
            aliases=tuple(known_as[parameter][1:]),
            dtype=parameter.dtype,
            device=state.sharded.device_of(parameter),
            status=(found := _status(parts[name], state))[0],
            reason=found[1],
            norm=state.norms.get(name, 0.0),
            _stored=parameter.grad,
            _state=state,
        )


def _status(part: Part, state: GradientState) -> tuple[Status, str | None]:
    norm = state.norms.get(part.name, 0.0)
    if part.frozen is not None:
        return "frozen", part.frozen
    if part.name not in state.used:
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
    parts = state.sharded.parts.values()
    if all(p.name in state.watched or p.frozen is not None or not p.is_here for p in parts):
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
    names, known = state.names, state.sharded.norms
    shards = counted_gradients(state.sharded)
    norms_of = {name: known[name] for name in shards if name in known}
    rest = [name for name in shards if name not in norms_of]
    if rest:
        norms_of |= zip(rest, norms([shards[name] for name in rest]), strict=True)
    used = torch.tensor([name in state.used_here for name in names], dtype=torch.float64)
    squares = torch.zeros(len(names), dtype=torch.float64, device=device)
    for where in {norm.device for norm in norms_of.values()}:
        blank = torch.zeros((), device=where)
        here = {name: norm for name, norm in norms_of.items() if norm.device == where}
        each = [here.get(name, blank) for name in names]
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


def counted_gradients(sharded: ShardedModel) -> dict[str, Tensor]:
    """Return name → gradient of the parameters whose part here counts in sums over all ranks."""
    return {
        name: local_part(parameter.grad)
        for name, parameter in sharded.named_parameters()
        if parameter.grad is not None and sharded.parts[name].counts
    }


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
