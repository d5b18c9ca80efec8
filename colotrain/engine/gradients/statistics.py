"""Statistics of every gradient, from this rank's shards and one small collective per record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.gradients.gradients import GradientState, counted, read
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.events.gradients import Gradients, Parameters

LARGEST, ZEROS, NONFINITE, UPDATE, WEIGHT = range(5)
DIGITS = 8


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Measures one step: call `begin` before the optimizer's update and `finish` after it."""

    state: GradientState
    optimizer: ShardOptimizer
    before: dict[str, Tensor] = field(default_factory=dict)
    """Copies of this rank's shards, of the parameters that are being updated."""
    rows: dict[str, int] = field(default_factory=dict)
    columns: Tensor | None = None
    """Statistics of this rank, float64 [parameters, 5]."""

    @torch.no_grad()
    def begin(self) -> None:
        parameters = list(self.state.sharded.module.parameters())
        self.columns = torch.zeros(len(parameters), 5, dtype=torch.float64)
        for row, name, parameter in zip(self.columns, self.state.names, parameters, strict=True):
            shard = counted(self.state, name, parameter, parameter.grad)
            if shard is not None:
                row[LARGEST] = shard.abs().max() * self.state.factor
                row[ZEROS] = shard.numel() - torch.count_nonzero(shard)
                if not math.isfinite(row[LARGEST]):
                    row[NONFINITE] = shard.numel() - torch.isfinite(shard).sum()
        self.rows = {name: i for i, name in enumerate(self.state.names)}

    @torch.no_grad()
    def before_update(self, names: list[str]) -> None:
        shards = self.optimizer.shards
        self.before = {name: shards[name].detach().clone() for name in names}

    @torch.no_grad()
    def after_update(self, names: list[str]) -> None:
        assert self.columns is not None
        for name in names:
            old, shard = self.before.pop(name), self.optimizer.shards[name]
            parameter = self.optimizer.parameters[name]
            if counted(self.state, name, parameter, parameter) is None:
                continue
            row = self.columns[self.rows[name]]
            row[UPDATE] = torch.linalg.vector_norm(shard - old).square()
            row[WEIGHT] = torch.linalg.vector_norm(old).square()

    def finish(self, step: int) -> Gradients:
        """Return the gradients of `step`, the same on every rank. All ranks must call."""
        assert self.columns is not None
        return _event(self.state, _over_all_ranks(self.columns, self.state), step)


def _over_all_ranks(mine: Tensor, state: GradientState) -> Tensor:
    device = torch.device(state.sharded.mesh.device_type)
    parts = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.to(device))
    stacked = torch.stack(parts).cpu()
    total = stacked.sum(0)
    total[:, LARGEST] = stacked[:, :, LARGEST].amax(0)
    return total


def _event(state: GradientState, totals: Tensor, step: int) -> Gradients:
    views = list(read(state.sharded.module))
    rows = totals.tolist()
    sizes = [math.prod(view.shape) for view in views]
    changes = [math.sqrt(row[UPDATE] / row[WEIGHT]) if row[WEIGHT] > 0 else 0.0 for row in rows]
    pairs = list(zip(rows, sizes, strict=True))
    return Gradients(
        step=step,
        global_norm=state.norm,
        clipped_to=state.norm * state.clip_ratio if state.clip_ratio < 1.0 else None,
        status=[view.status for view in views],
        reason={view.name: view.reason for view in views if view.reason is not None},
        norm=[_short(view.norm) for view in views],
        rms=[_short(v.norm / math.sqrt(n or 1)) for v, n in zip(views, sizes, strict=True)],
        max_abs=[_short(row[LARGEST]) for row in rows],
        zero_fraction=[_short(row[ZEROS] / n) if n else 0.0 for row, n in pairs],
        nonfinite=[int(row[NONFINITE]) for row in rows],
        update_ratio=[_short(change) for change in changes],
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def describe_parameters(model: nn.Module) -> Parameters:
    """Return the parameters in the order of the columns of `Gradients`."""
    views = list(read(model))
    return Parameters(
        names=[view.name for view in views],
        shapes=[list(view.shape) for view in views],
        dtypes=[str(view.dtype).removeprefix("torch.") for view in views],
        aliases={view.name: list(view.aliases) for view in views if view.aliases},
    )
