"""The micro-batches of one step, which can be computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from colotrain import generators
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.accumulation import Batch, StepTotals, to_device
from colotrain.engine.model.unchanged import kept_buffers
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.clock import StepClock
from colotrain.spec.phases import Phase


class Batches:
    """The micro-batches of the next step, on the device."""

    def __init__(self, run: Run, clock: StepClock | None = None) -> None:
        self.run, self.clock = run, clock
        self.read: list[Batch] = []
        """The micro-batches, where a pass before the step has read them already."""
        self.generators = generators.states(run.device)
        """State of the random number generators before the step."""
        nothing = torch.zeros(3, dtype=torch.float64, device=run.device)
        self.totals = StepTotals(
            nominal=run.targets.nominal,
            loss_scale=run.loss_scale.scale,
            loss_sum=nothing[0],
            count=nothing[1],
            odd=nothing[2],
            asks_odd=run.step == 0,
        )

    def __iter__(self) -> Iterator[Batch]:
        run, num = self.run, self.run.plan.batch.accumulation_steps
        for index in range(num):
            run.at(Phase.DATA)
            with self.clock.fetching() if self.clock is not None else nullcontext():
                batch = self.read[index] if self.read else self._fetch(index)
            run.at(Phase.COMPUTE)
            run.progress.at_micro_batch(index, of=num, calls=len(run.sharded.calls))
            run.history.micro_batches += 1
            yield batch

    def _fetch(self, index: int) -> Batch:
        run = self.run
        return to_device(run.train_data.micro_batch(run.batch_index, index), run.device)

    @contextmanager
    def again(self, *, phase: Phase) -> Iterator[Batches]:
        """Yield the same micro-batches, for a pass with the same weights and random numbers."""
        run = self.run
        before, done = run.phase, run.history.micro_batches
        run.at(phase)
        generators.set_states(run.device, self.generators)
        gradients.clear_(run.sharded.module)
        with torch.no_grad(), kept_buffers(run.sharded.module), torch.enable_grad():
            again = Batches(run)
            again.read = self.read
            yield again
        if run.tiers is not None:
            run.tiers.transfers.wait_for_gradients()
        gradients.drop_unused_(run.gradients)
        run.history.micro_batches = done  # the second pass is not training
        run.at(before)
