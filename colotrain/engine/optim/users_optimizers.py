"""A user's own optimizer, which gets DTensors: made, watched, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from colotrain.dotted import import_target
from colotrain.engine.comms.groups import Groups as Comms
from colotrain.engine.optim.base import Groups
from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.sharding.fsdp_internals import dtensor, dtensor_of
from colotrain.errors import ConfigError, Problem, UsageError
from colotrain.spec.plan import OptimPlan

NUMBERS = frozenset({Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__})
"""Functions that make Python numbers of a tensor."""
LOOKED_AT = 4096
"""Elements of each shard that are compared before and after the first step."""
VISIBLE = 1e-5
"""Share of a value by which it certainly changes, in any precision."""


def make_users(plan: OptimPlan, groups: Groups) -> torch.optim.Optimizer:
    """Make the optimizer that `optim.name` imports; `ConfigError` where it cannot be made."""
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


class WholeNumbers(TorchFunctionMode):
    """Makes Python numbers of whole tensors; torch makes them of this rank's part (collective)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NUMBERS and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def updating_in_place(
    name: str, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, lr: float
) -> Iterator[None]:
    """Raise `ColotrainError` if no element of `shards` changes meanwhile though some should.

    `p.data = ...` gives a parameter other memory, which is not that of the shard. `grads` are the
    gradients by name, shaped like their shards.
    """
    before = {n: shards[n].detach().flatten()[:LOOKED_AT].clone() for n in grads}
    yield
    for n, value in before.items():
        if not torch.equal(value, shards[n].detach().flatten()[:LOOKED_AT]):
            return
    for n, grad in grads.items():
        update = lr * grad.flatten()[:LOOKED_AT].abs()
        if bool((update > VISIBLE * (before[n].abs() + VISIBLE)).any()):
            raise UsageError(
                f"optim.name={name}: its first step changed no parameter",
                "update parameters in place, as p.add_() and p.copy_() do: what is assigned to "
                "p.data does not reach a sharded parameter",
            )


class WholeMatrices:
    """Parameters over all ranks that divide them, where ranks along TP or EP do so beside shards.

    All ranks must make it, which makes no collective.
    """

    def __init__(self, comms: Comms, parts: PartMap) -> None:
        self.parts, self.mesh = parts, comms.by_matrices()

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a sharded parameter or its gradient as the whole; it shares its memory."""
        if not isinstance(tensor, DTensor):
            return tensor
        part = self.parts[name]
        dim = part.divided.get(self.parts.axis)
        inner = (Replicate() if dim is None else Shard(dim), Shard(0))
        outer = (Replicate(),) * (self.mesh.ndim - 2)
        return dtensor(tensor.to_local(), self.mesh, (*outer, *inner), torch.Size(part.whole))

    def sharded(self, name: str, value: Tensor, parameter: Tensor) -> Tensor | None:
        """Return state of a parameter as this rank's shards have it; None where that has none."""
        if not isinstance(value, DTensor):
            return value
        *outer, matrices, shards = value.placements
        dim, shape = self.parts[name].divided.get(self.parts.axis), list(value.shape)
        if not all(placement.is_replicate() for placement in outer):
            return None
        if dim is not None and matrices.is_shard(dim):
            shape[dim] //= self.mesh.size(self.mesh.ndim - 2)
        elif not matrices.is_replicate():
            return None
        if shards.is_replicate():
            return value.to_local()
        if not shards.is_shard(0) or not isinstance(parameter, DTensor):
            return None
        return dtensor_of(value.to_local(), parameter, torch.Size(shape))


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
