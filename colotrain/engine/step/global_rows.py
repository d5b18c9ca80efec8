"""What the loss of a sample needs to know of the other samples of its global batch.

Some losses compare samples, or depend on a mean over all of them, such as KTO's KL. In a pass
without gradients before each step the model says a small row of each sample; the rows of the whole
global batch are gathered, and the loss of each micro-batch gets them. So a step is the same however
its batch is divided into micro-batches and ranks. The pass draws the random numbers that the step
then draws again, as dropout must drop the same in both (GradCache, Gao et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import generators
from colotrain.data.read.loader import BatchLoader
from colotrain.engine.comms.waiting import waiting
from colotrain.engine.gradients.accumulation import Batch, to_device
from colotrain.engine.model.unchanged import kept_buffers, uncompiled
from colotrain.engine.pipeline.forward_only import through_stages
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.batches import Batches
from colotrain.engine.step.participant import Participant
from colotrain.models.objective import objective_of
from colotrain.models.objectives.base import POSITIONS, GlobalRows
from colotrain.spec.axes import STAGE
from colotrain.spec.phases import Phase


class GlobalPass(Participant):
    """Makes the pass before a step's own forwards, where the objective needs one."""

    def before_forward(self, batches: Batches) -> None:
        run = self.run
        if global_rows_of(run) is None:
            return
        num = run.plan.batch.accumulation_steps
        run.at(Phase.GLOBAL_PASS)
        batches.read = list(micro_batches(run, run.train_data, run.batch_index, num))
        run.sharded.calls.clear()


def global_rows_of(run: Run) -> GlobalRows | None:
    objective = objective_of(run.sharded.module)
    return None if objective is None else objective.global_rows


def micro_batches(run: Run, data: BatchLoader, step: int, num: int) -> Iterator[Batch]:
    """Yield the first `num` micro-batches of a global batch, on the device.

    Each has what its loss needs to know of all samples. All ranks must call; where nothing is
    needed, each is read when it is asked for.
    """
    across, device = global_rows_of(run), run.device
    batches = (to_device(data.micro_batch(step, index), device) for index in range(num))
    if across is None:
        yield from batches
        return
    read = list(batches)
    rows = _rows_of_all(run, across, data, step, read)
    if rows is None:  # the last stage has them, and computes the loss
        yield from read
        return
    shared = across.entries(rows)
    for index, batch in enumerate(read):
        own = torch.tensor(_positions(data, step, index), device=device)
        batch.update(shared | {POSITIONS: own})
        yield batch


def _positions(data: BatchLoader, step: int, index: int) -> list[int]:
    """Numbers of a micro-batch's samples within their global batch."""
    found = data.positions(step, index)
    if not found and data.end is not None:
        found = range(data.end - 1, data.end)  # the sample that is read instead
    return [position - step * data.batch.global_batch for position in found]


def _rows_of_all(
    run: Run, across: GlobalRows, data: BatchLoader, step: int, batches: list[Batch]
) -> Tensor | None:
    """The rows of all samples of a global batch, in the order of their positions.

    None on pipeline stages before the last. All ranks must call.
    """
    size, first = data.batch.micro_batch, step * data.batch.global_batch
    stop = first + data.batch.global_batch
    own = _own_rows(run, across, batches, size)
    if own is None:
        return None
    of_stage = run.plan.ranks.of_stage(run.sharded.stage.index)
    ranks: list[Tensor | None] = [None] * len(of_stage)
    gathered = [torch.empty_like(own) for _ in ranks]
    with waiting():
        dist.all_gather(gathered, own, group=run.sharded.comms[STAGE])
    for rank, rows in zip(of_stage, gathered, strict=True):
        ranks[run.plan.ranks.reader(rank)] = rows
    found = torch.stack([rows for rows in ranks if rows is not None], 1).flatten(0, 2)
    return found[: (stop if data.end is None else min(stop, data.end)) - first]


@torch.no_grad()
def _own_rows(run: Run, across: GlobalRows, batches: list[Batch], size: int) -> Tensor | None:
    """The rows of this rank's micro-batches [number, size, ...], short ones padded with zeros.

    None on pipeline stages before the last. Buffers and generators are as before afterwards. All
    ranks must call.
    """
    model, stage, drawn = run.sharded.module, run.sharded.stage, generators.states(run.device)
    found = []
    with kept_buffers(model):
        for batch in batches:
            run.beat()
            run.sharded.calls.clear()
            is_short = len(batch["input_ids"]) < size
            with uncompiled(run.plan, is_short):
                rows = through_stages(stage, model, across.rows, batch)
            if rows is not None:
                padding = rows.new_zeros(size - len(rows), *rows.shape[1:])
                found.append(torch.cat([rows, padding]))
    generators.set_states(run.device, drawn)
    reshard(run.sharded)
    return torch.stack(found) if found else None
