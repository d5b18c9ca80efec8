"""The optimizer: torch's own, over this rank's shards, with parameters addressed by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain.engine.comms.groups import Groups
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.base import Slices, Unsharded
from colotrain.engine.optim.optimizers import make, needs_loops
from colotrain.engine.optim.parameter_settings import ParameterSettings, settings_of
from colotrain.engine.optim.schedule import schedule
from colotrain.engine.optim.schedule_free import averaged
from colotrain.engine.optim.users_optimizers import (
    WholeMatrices,
    WholeNumbers,
    to_checkpoint_layout,
    updating_in_place,
)
from colotrain.engine.parts.part_map import PartMap, local_part
from colotrain.engine.sharding.fsdp_internals import dtensor_of
from colotrain.errors import UsageError
from colotrain.lost_peers import peer_lost_in
from colotrain.spec.axes import COPY, MATRICES, Axis
from colotrain.spec.offload import StatePerRow
from colotrain.spec.optimizers import OPTIMIZERS, optimizer_of
from colotrain.spec.plan import OptimPlan
from colotrain.torch_internals import multiply, multiply_


class UpdateObserver(Protocol):
    """Receives the names of parameters just before and just after their update."""

    def before_update(self, names: list[str]) -> None: ...

    def after_update(self, names: list[str]) -> None: ...


class ShardOptimizer:
    """Updates every trainable parameter once per step.

    An elementwise update of a shard needs only the shard, so such an optimizer gets local tensors;
    `engine.optim.optimizers` says what the others get. `steps` counts the optimizer's own steps. If
    the placement of `tiers` streams, parameters are updated group by group while their state is at
    hand.
    """

    def __init__(
        self,
        plan: OptimPlan,
        *,
        max_steps: int,
        tiers: Tiers | None = None,
        undecayed: Set[str] = frozenset(),
        aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
        seed: int = 0,
        parts: PartMap | None = None,
        comms: Groups | None = None,
    ) -> None:
        self.plan, self.max_steps, self.steps, self.tiers = plan, max_steps, 0, tiers
        self.seed, self.kind = seed, optimizer_of(plan.name)
        self.map, self.comms = parts, comms
        self.whole: WholeMatrices | None = None
        """What a user's optimizer gets where ranks divide matrices."""
        self._parts: dict[str, Sequence[Slices]] = {}
        """Name → what each rank of `group` has of the parameter."""
        self.of_shards = plan.name in OPTIMIZERS
        """Whether it gets local shards; a user's own optimizer gets DTensors."""
        self.undecayed = undecayed
        """Names of the norms and biases of the model, which have no weight decay."""
        self.aliases = aliases
        """Name of a tied parameter → all of its names."""
        self._calls = 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, nn.Parameter] = {}
        self.stepped: dict[str, nn.Parameter] = {}
        """Name → parameter in torch's optimizer: the local shard, or the sharded parameter."""
        self._names: dict[nn.Parameter, str] = {}
        self.torch: torch.optim.Optimizer | None = None
        self._given: list[dict[str, Any]] = []
        """Settings of each parameter group before any step."""
        self.observer: UpdateObserver | None = None
        self.kept: dict[str, Tensor] = {}
        """Name → what training goes on with, while the parameter has its mean (`average_`)."""

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Begin to train `parameters` (name → sharded parameter)."""
        fresh = {n: nn.Parameter(local_part(p.detach())) for n, p in parameters.items()}
        self.parameters.update(parameters)
        self.shards.update(fresh)
        self.stepped.update(fresh if self.of_shards else self._as_users(parameters))
        self._names |= {self.stepped[name]: name for name in fresh}
        groups: dict[tuple[ParameterSettings, bool], list[nn.Parameter]] = {}
        if self.torch is None and not fresh:  # a pipeline stage that is frozen steps as the others
            groups[ParameterSettings(lr_scale=1.0, weight_decay=0.0, is_hidden=False), False] = []
        for name, shard in fresh.items():
            loops = needs_loops(self.plan.name, name, shard)
            groups.setdefault((self._settings(name), loops), []).append(self.stepped[name])
        of_torch: list[dict[str, Any]] = []
        for (settings, loops), chosen in groups.items():
            group: dict[str, Any] = {"params": chosen, "weight_decay": settings.weight_decay}
            group["lr"] = self.plan.lr * settings.lr_scale
            group |= {"is_hidden": settings.is_hidden} if self.kind.tells_hidden else {}
            group |= {"fused": False} if loops else {}
            of_torch.append(group)
        if self.torch is None:  # Adagrad of torch 2.11 makes state here alone
            self.torch = make(self.plan, of_torch, self)
            self.torch.register_step_post_hook(self._count)
        else:
            for group in of_torch:
                self.torch.add_param_group(group)
        for made in self.torch.param_groups[len(self._given) :]:
            self._given.append({k: _copy(v) for k, v in made.items() if k != "params"})
        if self.tiers is not None:
            self.tiers.watch_gradients()

    def _as_users(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """Return parameters as a user's optimizer gets them, as if no matrix was divided."""
        if self.comms is None or self.map is None or self.comms.ranks.size(*MATRICES) == 1:
            return parameters
        whole = self.whole = self.whole or WholeMatrices(self.comms, self.map)
        return {n: nn.Parameter(whole.of(n, p.detach())) for n, p in parameters.items()}

    def _settings(self, name: str) -> ParameterSettings:
        ndim = self.parameters[name].ndim
        aliases = self.aliases.get(name, ())
        return settings_of(name, ndim, self.plan, undecayed=self.undecayed, aliases=aliases)

    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks that divide a copy of a stage's parameters; None: this rank alone."""
        return None if self.comms is None else self.comms[COPY]

    def parts(self, shard: nn.Parameter) -> Sequence[Slices]:
        """Return, by rank of `group`, where its numbers stand in the whole parameter."""
        name = self._names[shard]
        if self.comms is None or self.map is None:
            return Unsharded().parts(shard)
        if name not in self._parts:
            peers = self.comms.ranks.peers(self.comms.rank, *COPY)
            self._parts[name] = [self.map.slices_on(name, rank) for rank in peers]
        return self._parts[name]

    def name(self, shard: nn.Parameter) -> str:
        return self._names[shard]

    def first_row(self, shard: nn.Parameter) -> int:
        """Return the index in the whole parameter of this rank's first row."""
        begin = () if self.map is None else self.map[self._names[shard]].begin
        return begin[0] if begin else 0

    def divided(self, shard: nn.Parameter) -> Mapping[Axis, int]:
        """Return axis → dimension of the parameter that the ranks along the axis divide."""
        return {} if self.map is None else self.map[self._names[shard]].divided

    def whole_shape(self, shard: nn.Parameter) -> torch.Size:
        return self._whole_shape(self._names[shard])

    def _whole_shape(self, name: str) -> torch.Size:
        return self.parameters[name].shape if self.map is None else torch.Size(self.map[name].whole)

    def sum_(self, values: Tensor, axes: tuple[Axis, ...]) -> None:
        """Sum `values` in place over the ranks that differ in `axes` (collective)."""
        assert self.comms is not None
        self.comms.sum_(values, axes)

    @property
    def streams(self) -> bool:
        """Whether the update goes group by group. Stored gradients are then not scaled in place."""
        return self.tiers is not None and self.tiers.placement.streams

    def drop(self, names: Iterable[str]) -> None:
        """Stop training parameters, and drop their optimizer state."""
        assert self.torch is not None
        names = list(names)
        self.forget_state_(names)
        for name in names:
            del self.shards[name], self.parameters[name]
        dropped = {self.stepped.pop(name) for name in names}
        for group in self.torch.param_groups:
            group["params"] = [shard for shard in group["params"] if shard not in dropped]

    def step(self, *, factor: float) -> float:
        """Update once with the gradients times `factor`; returns the learning rate used."""
        assert self.torch is not None
        if self.streams and not self.of_shards:
            raise UsageError(
                f"optim.name={self.plan.name}: its state cannot be streamed from host or disk",
                f"give plugin.budget more room, or choose one of {', '.join(OPTIMIZERS)}",
            )
        share = schedule(self.plan, self.steps, self.max_steps)
        for group, given in zip(self.torch.param_groups, self._given, strict=True):
            group["lr"] = given.get("lr", self.plan.lr) * share  # the class may give it another
        self._calls, visits = 0, 0
        for names in self._groups_to_update():
            visits += 1
            if self.observer is not None:
                self.observer.before_update(names)
            self._update(names, factor)
            if self.observer is not None:
                self.observer.after_update(names)
        self.steps += self._calls // max(visits, 1)
        return self.plan.lr * share

    def _groups_to_update(self) -> Iterable[list[str]]:
        """Return the names to update together: all at once, or group by group."""
        if self.tiers is not None and self.streams:
            return self.tiers.stream_updates(self)
        return [list(self.shards)]

    def _update(self, names: list[str], factor: float) -> None:
        """Update `names` alone: torch's optimizers skip parameters without a gradient."""
        assert self.torch is not None
        grads = {n: local_part(g) for n in names if (g := self.parameters[n].grad) is not None}
        if not self.streams:
            scale_(list(grads.values()), factor)
        elif factor != 1.0 and grads:  # gradients in a lower tier stay unscaled there
            scaled = multiply(list(grads.values()), factor)
            grads = dict(zip(grads, scaled, strict=True))
        for name, grad in grads.items():
            if self.of_shards:  # a user's optimizer sees the parameter's own gradient
                self.stepped[name].grad = grad
            elif self.whole is not None:
                self.stepped[name].grad = self.whole.of(name, _like(self.parameters[name], grad))
        try:
            with self._watched(grads):
                self.torch.step()
        except (RuntimeError, NotImplementedError) as error:
            if self.of_shards or peer_lost_in(error):
                raise
            raise UsageError(
                f"optim.name={self.plan.name}: it cannot update sharded parameters ({error})",
                f"use operations that DTensors have, or one of {', '.join(OPTIMIZERS)}",
            ) from error
        for name in grads:
            if self.of_shards or self.whole is not None:
                self.stepped[name].grad = None

    @contextmanager
    def _watched(self, grads: Mapping[str, Tensor]) -> Iterator[None]:
        """Watch a step of the user's own optimizer; of torch's, nothing."""
        assert self.torch is not None
        with ExitStack() as stack:
            if not self.of_shards:
                stack.enter_context(WholeNumbers())
                if self.steps == 0:
                    lr = max(group["lr"] for group in self.torch.param_groups)
                    watched = updating_in_place(self.plan.name, self.shards, grads, lr=lr)
                    stack.enter_context(watched)
            yield

    @torch.no_grad()
    def average_(self) -> None:
        """Give every parameter that has state the mean of its iterates, until `put_back_`."""
        assert self.torch is not None
        if not self.steps:
            return
        for name in (name for visited in self._groups_to_update() for name in visited):
            state, shard = self.torch.state.get(self.stepped[name]), self.shards[name]
            if state:
                self.kept[name] = _like(self.parameters[name], shard.detach().clone())
                shard.copy_(averaged(shard, state["z"], self.plan.betas[0]))

    @torch.no_grad()
    def put_back_(self) -> None:
        if not self.kept:
            return
        for name in (name for visited in self._groups_to_update() for name in visited):
            if name in self.kept:
                self.shards[name].copy_(local_part(self.kept[name]))
        self.kept = {}

    def _count(self, *_: object) -> None:
        self._calls += 1

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return name → state tensors; those shaped like their parameter are DTensors, as it is.

        Raises `ColotrainError` for a layout that could not be saved. All ranks must call.
        """
        return {
            name: {k: self._tensor(name, k, v) for k, v in state.items() if isinstance(v, Tensor)}
            for name, state in self._states()
        }

    def divides(self, name: str, key: str, *, ndim: int) -> bool:
        """Whether ranks with parts of experts or matrices have parts of this state, too.

        The parameter may be one that no longer trains.
        """
        dim = None if self.map is None else self.map[name].divided.get(self.map.axis)
        if dim is None or self.torch is None:
            return False
        if self.of_shards:
            return self.kind.sums.get(key) != dim - ndim
        stepped = self.stepped.get(name)
        value = None if stepped is None else self.torch.state.get(stepped, {}).get(key)
        return isinstance(value, DTensor) and value.placements[-2].is_shard()

    def held_state(self) -> dict[str, dict[str, Tensor]]:
        """Return name → this rank's part of the state tensors."""
        if not self.of_shards:
            whole = self.state()
            return {n: {k: local_part(v) for k, v in state.items()} for n, state in whole.items()}
        return {
            name: {k: v for k, v in state.items() if isinstance(v, Tensor)}
            for name, state in self._states()
        }

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """Return name → state that is no tensor, such as a step count that is an int."""
        return {
            name: {k: v for k, v in state.items() if v is not None and not isinstance(v, Tensor)}
            for name, state in self._states()
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        assert self.torch is not None
        if self.tiers is not None:
            self.tiers.wait_for_copies()
        for name, stepped in self.stepped.items():
            if stepped in self.torch.state:
                yield name, self.torch.state[stepped]

    def set_plain_state(self, name: str, key: str, value: Any) -> None:
        """Set one value of state, unless the parameter has no state yet."""
        state = next((state for known, state in self._states() if known == name), None)
        if state:
            state[key] = value

    def plain_groups(self) -> dict[str, dict[str, Any]]:
        """Return what the user's own optimizer changed in its parameter groups, by group number."""
        if self.torch is None or self.of_shards:
            return {}
        changed = {}
        for number, (group, given) in enumerate(
            zip(self.torch.param_groups, self._given, strict=True)
        ):
            own = {k: v for k, v in group.items() if k not in ("params", "lr")}
            changed[str(number)] = {
                k: v for k, v in own.items() if k not in given or _differs(v, given[k])
            }
        return changed

    def set_plain_group(self, number: int, key: str, value: Any) -> None:
        """Set one value of a parameter group, if there still is one with this number."""
        assert self.torch is not None
        if number < len(self.torch.param_groups):
            self.torch.param_groups[number][key] = value

    def refuse_other_state(self) -> None:
        """Raise `ColotrainError` for state that belongs to no parameter: it would not be saved."""
        assert self.torch is not None
        own = set(self.stepped.values())
        foreign = [key for key in self.torch.state if key not in own]
        if foreign:
            raise UsageError(
                f"optim.name={self.plan.name}: its state has a key of type "
                f"{type(foreign[0]).__name__}, which no checkpoint can hold",
                "keep state by parameter or in parameter groups, or set checkpoint.every=0",
            )

    def _tensor(self, name: str, key: str, value: Tensor) -> Tensor:
        is_whole = self.kind.sums.get(key) == -2 and value.ndim == 2  # of all rows
        has_rows = self.of_shards and not is_whole
        parameter = self.parameters[name]
        if has_rows:
            return _like(parameter, value)
        if self.whole is None or self.of_shards:
            found = to_checkpoint_layout(value)
        else:
            found = self.whole.sharded(name, value, parameter)
        if found is None:
            raise UsageError(
                f"optim.name={self.plan.name}: its state {key!r} of {name} is a "
                f"{type(value).__name__} that no checkpoint can hold",
                "keep tensors of the parameter's shape, or whole ones, or set checkpoint.every=0",
            )
        return found

    @property
    def begins_with_zeros(self) -> bool:
        """Whether state is zero before the first update; unknown for a user's own optimizer."""
        return self.kind.begins_with_zeros

    def prepare_state_(self, names: Set[str] | None = None) -> None:
        """Make zeroed state for `names` (default: all), so that a checkpoint can be read into it.

        State that exists already stays as it is.
        """
        assert self.torch is not None
        for name in (name for visited in self._groups_to_update() for name in visited):
            stepped = self.stepped[name]
            if (names is None or name in names) and not self.torch.state[stepped]:
                is_hidden, whole = self._settings(name).is_hidden, self._whole_shape(name)
                blank = _blank_state(self.plan, stepped, whole=whole, is_hidden=is_hidden)
                self.torch.state[stepped] = blank
        if self.tiers is not None:
            self.tiers.wait_for_copies()

    def forget_state_(self, names: Iterable[str]) -> None:
        """Drop the state of `names`; the next update of each begins like a first one."""
        assert self.torch is not None
        names = list(names)
        if self.tiers is not None:
            self.tiers.forget(names)
        for name in names:
            self.torch.state.pop(self.stepped[name], None)


def state_per_row(plan: OptimPlan) -> StatePerRow:
    """Return the function that counts the bytes of an optimizer's state.

    What no table knows exactly is taken from one step on a small matrix, per byte of parameter.
    """
    if optimizer_of(plan.name).is_counted:
        return plan.state_bytes_per_row
    matrix = nn.Parameter(torch.zeros(64, 64))
    matrix.grad = torch.zeros_like(matrix)
    small = make(plan, [{"params": [matrix]}], Unsharded())
    small.step()
    tensors = [t for t in small.state[matrix].values() if isinstance(t, Tensor) and t.ndim]
    ratio = sum(t.nbytes for t in tensors) / matrix.nbytes
    return lambda shape, itemsize: ratio * math.prod(shape[1:]) * itemsize


def _blank_state(
    plan: OptimPlan, like: nn.Parameter, *, whole: torch.Size, is_hidden: bool
) -> dict[str, Any]:
    """Return the zeroed state that a first step makes for a part of a `whole` parameter."""
    twin = nn.Parameter(torch.zeros_like(like.detach()))
    twin.grad = torch.zeros_like(twin)
    group = {"params": [twin], "weight_decay": 0.0} | ({"is_hidden": True} if is_hidden else {})
    group |= {"fused": False} if twin.is_complex() else {}
    optimizer = make(plan, [group], Unsharded(whole))
    optimizer.step()
    state = dict(optimizer.state[twin])
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()
    return state


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _differs(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return not torch.equal(value, before)
    return type(value) is not type(before) or bool(value != before)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value` as a DTensor if it has one row per row of this rank's shard of `parameter`."""
    if not isinstance(parameter, DTensor) or value.ndim != parameter.ndim:
        return value
    if value.shape[0] != parameter.to_local().shape[0]:
        return value
    shape = torch.Size((parameter.shape[0], *value.shape[1:]))
    return dtensor_of(value, parameter, shape)


def scale_(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place, unless the factor is one."""
    if factor != 1.0 and tensors:
        multiply_(tensors, factor)
