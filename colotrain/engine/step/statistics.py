"""Statistics of every gradient, from this rank's shards and one small collective per record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.gradients.gradients import (
    GradientState,
    counted_gradients,
    norms,
    read,
    to_device,
)
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.events.gradients import Gradients, Parameters
from colotrain.torch_internals import subtract_

LARGEST, ZEROS, NONFINITE, UPDATE, WEIGHT = range(5)
DIGITS = 8


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Measures one step: call `begin` before the optimizer's update and `finish` after it.

    Until `finish` values stay on their device, so that the host waits for a GPU once a record.
    """

    state: GradientState
    optimizer: ShardOptimizer
    before: dict[str, Tensor] = field(default_factory=dict)
    """Copies of this rank's shards, of the parameters that are being updated."""
    rows: dict[str, int] = field(default_factory=dict)
    found: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(parameter, statistic) → this rank's value, a scalar."""
    factor: float = 1.0
    """Factor by which stored gradients become those of the step; clipping changes it later."""

    @torch.no_grad()
    def begin(self) -> None:
        self.factor = self.state.factor
        self.rows = {name: i for i, name in enumerate(self.state.names)}
        shards = counted_gradients(self.state.sharded)
        self._store(LARGEST, list(shards), norms([*shards.values()], order=math.inf))
        for name, shard in shards.items():
            row = self.rows[name]
            self.found[row, ZEROS] = shard.numel() - torch.count_nonzero(shard)
            if not math.isfinite(self.state.norms.get(name, 0.0)):
                self.found[row, NONFINITE] = shard.numel() - torch.isfinite(shard).sum()

    @torch.no_grad()
    def before_update(self, names: list[str]) -> None:
        shards = self.optimizer.shards
        self.before = {name: shards[name].detach().clone() for name in names}

    @torch.no_grad()
    def after_update(self, names: list[str]) -> None:
        parts = self.state.sharded.parts
        mine = [name for name in names if parts[name].counts]
        changes = [self.before[name] for name in mine]
        self._store(WEIGHT, mine, norms(changes))
        if changes:
            subtract_(changes, [self.optimizer.shards[name].detach() for name in mine])
        self._store(UPDATE, mine, norms(changes))
        self.before = {}

    def _store(self, statistic: int, names: list[str], values: list[Tensor]) -> None:
        for name, value in zip(names, values, strict=True):
            self.found[self.rows[name], statistic] = value

    def finish(self, step: int) -> Gradients:
        """Return the gradients of `step`, the same on every rank. All ranks must call."""
        return _event(self.state, _over_all_ranks(self._table()), step)

    def _table(self) -> Tensor:
        """Return this rank's statistics on the device that trains, float64 [parameters, 5]."""
        device = torch.device(self.state.sharded.comms.device)
        table = torch.zeros(len(self.state.names), 5, dtype=torch.float64, device=device)
        for where in {value.device for value in self.found.values()}:
            here = {place: v for place, v in self.found.items() if v.device == where}
            rows, columns = to_device(torch.tensor(list(here)).T.contiguous(), device)
            values = torch.stack([value.double() for value in here.values()])
            table[rows, columns] = to_device(values, device)
        table[:, LARGEST] *= self.factor
        table[:, UPDATE:].square_()
        return table


def _over_all_ranks(mine: Tensor) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
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


def describe_parameters(model: nn.Module, stages_of: Mapping[str, Sequence[int]]) -> Parameters:
    """Return the parameters in the order of the columns of `Gradients`.

    `stages_of` names the pipeline stages that hold each; it is empty where there are none.
    """
    views = list(read(model))
    return Parameters(
        names=[view.name for view in views],
        shapes=[list(view.shape) for view in views],
        dtypes=[str(view.dtype).removeprefix("torch.") for view in views],
        aliases={view.name: list(view.aliases) for view in views if view.aliases},
        stages={name: list(stages) for name, stages in stages_of.items()} or None,
    )
