"""What the optimizers of this package share: relation to whole parameters, and parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.spec.axes import Axis

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""
Slices = tuple[slice, ...]
"""A slice of each dimension of a whole tensor."""


class Layout(Protocol):
    """Relation between this rank's part of a parameter and the whole parameter."""

    seed: int
    """The run's seed, of which random numbers in an update are a function."""

    def name(self, shard: nn.Parameter) -> str: ...

    def first_row(self, shard: nn.Parameter) -> int:
        """Return the index in the whole parameter of this rank's first row."""
        ...

    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks that divide a copy of a stage's parameters; None: this rank alone."""
        ...

    def parts(self, shard: nn.Parameter) -> Sequence[Slices]:
        """Return, by rank of `group`, where its numbers stand in the whole parameter."""
        ...

    def divided(self, shard: nn.Parameter) -> Mapping[Axis, int]:
        """Return axis → dimension of the parameter that the ranks along the axis divide."""
        ...

    def whole_shape(self, shard: nn.Parameter) -> torch.Size: ...

    def sum_(self, values: Tensor, axes: tuple[Axis, ...]) -> None:
        """Sum `values` in place over the ranks that differ in `axes` (collective)."""
        ...


class Unsharded:
    """The layout of a parameter that is whole on this rank, or stands for a part of one."""

    seed = 0

    def __init__(self, shape: torch.Size | None = None) -> None:
        self.shape = shape
        """Shape of the whole parameter that it stands for a part of."""

    def name(self, shard: nn.Parameter) -> str:
        return ""

    def first_row(self, shard: nn.Parameter) -> int:
        return 0

    def group(self) -> dist.ProcessGroup | None:
        return None

    def parts(self, shard: nn.Parameter) -> Sequence[Slices]:
        return (tuple(slice(0, size) for size in shard.shape),)

    def divided(self, shard: nn.Parameter) -> Mapping[Axis, int]:
        return {}

    def whole_shape(self, shard: nn.Parameter) -> torch.Size:
        return shard.shape if self.shape is None else self.shape

    def sum_(self, values: Tensor, axes: tuple[Axis, ...]) -> None:
        raise AssertionError("nothing is shared")


class OverShards(torch.optim.Optimizer):
    """An optimizer of local shards, whose gradients are there when it steps.

    A subclass says by `_update` how it updates them, and by `_begin` which state each begins with.
    `settings` are the defaults of parameter groups.
    """

    def __init__(self, params: Any, *, layout: Layout | None = None, **settings: Any) -> None:
        super().__init__(params, {"weight_decay": 0.0, **settings})
        self.layout = layout or Unsharded()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        self._update()

    def _update(self) -> None:
        raise NotImplementedError

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _updated(
        self,
    ) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any], dict[str, Any]]]:
        """Yield parameter, gradient, state and group of all that this step, counted, updates."""
        for group in self.param_groups:
            for parameter, grad, state in with_gradients(self, group):
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    self._begin(parameter, state)
                state["step"] += 1
                yield parameter, grad, state, group


def with_gradients(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
    for parameter in group["params"]:
        if parameter.grad is not None:
            yield parameter, parameter.grad, optimizer.state[parameter]


def batches(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[list[nn.Parameter], list[Tensor], list[dict[str, Any]]]]:
    """Yield parameters, gradients and states that are updated together, in few launches on a GPU.

    A batch is no larger than the largest parameter, so that updating it needs no more memory.
    """
    found = list(with_gradients(optimizer, group))
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


def adamw_(
    parameter: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: float,
    group: dict[str, Any],
) -> None:
    """torch.optim.AdamW's update, computed in the dtype of the moments."""
    beta1, beta2 = group["betas"]
    grad = grad.to(mean.dtype)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    wide = parameter.to(torch.promote_types(parameter.dtype, mean.dtype))
    wide.mul_(1 - group["lr"] * group["weight_decay"])
    root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    wide.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
    if wide is not parameter:
        parameter.copy_(wide)
