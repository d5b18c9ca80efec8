"""The events that a rank writes about each step."""

from __future__ import annotations

import math
import statistics
import sys
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from colotrain import module_tree
from colotrain.dotted import described
from colotrain.engine.gradients import gradients, noise
from colotrain.engine.model.precision import dtype_of
from colotrain.engine.model.probes import highest_peak, matmul_peak_flops, memory_now
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.participant import Agreed, Any_, Ask, Participant, StepResult
from colotrain.engine.step.pressure import PressureMeter
from colotrain.engine.step.statistics import Recorder
from colotrain.errors import MOST_WRITTEN, ColotrainError, message_of, shortened
from colotrain.events.kinds import DeviceMemory, Failure, Note, PeakFlops, PeakMemory, Step
from colotrain.events.log import EventWriter
from colotrain.lost_peers import peer_lost_in
from colotrain.rundir import NOISE
from colotrain.spec.axes import SAMPLES
from colotrain.spec.batch import is_due
from colotrain.spec.exit_codes import FAILED, USAGE, WORKER_FINAL, WORKER_USAGE
from colotrain.spec.phases import Phase

FIX_MEMORY = (
    "set train.micro_batch=1 or train.activation_checkpointing=full, or take plugin=gemini with "
    "a lower plugin.budget"
)
WINDOW = 128
SIGMAS = 6.0
MOST_UNUSED = 0.5
"""Share of what trains that may have no gradient in the first step without a message."""
MIN_STEPS = 32
"""Steps before the mean and deviation are used."""
SKIP_WINDOW = 20
MOST_SKIPPED = 0.5
"""Share of the last 20 steps that may be skipped without a message."""


def record_peak_flops(events: EventWriter, precision: str, device: torch.device) -> None:
    """Measure the peak FLOP/s of this rank's device, before anything is allocated on it."""
    flops = matmul_peak_flops(device, dtype_of(precision))
    events.write(PeakFlops(flops_per_s=flops, what=f"measured {precision} matmul"))


def is_recorded(run: Run, agreed: Agreed, *, step: int) -> bool:
    """Whether statistics of every gradient of `step` are due."""
    return agreed["record"] or is_due(step, run.plan.observe.grads_every)


class GradientRecords(Participant):
    """Writes statistics of every gradient, when they are due or asked for; and noise, if asked."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.recorder: Recorder | None = None
        self.noise: dict[str, Any] | None = None
        """Noise between this step's micro-batches, as a `Gradients` event has it."""
        self.has_begun = False

    def asks(self) -> Mapping[str, Ask]:
        asked = self.run.rundir.grads_request() if self.run.rank == 0 else None
        return {"record": Any_(asked is not None), "noise": Any_(asked == NOISE)}

    def before_update(self, agreed: Agreed) -> None:
        run = self.run
        self.recorder = self.noise = None
        if not self.has_begun and run.rank == 0 and (warning := left_out(run)):
            run.events.write(Note(step=run.step + 1, text=f"warning: {warning}"))
        self.has_begun = True
        if agreed["record"] and run.rank == 0:  # whatever comes of it: it is not asked for again
            run.rundir.grads_request_file.unlink(missing_ok=True)
        if agreed["noise"] and agreed.finite:
            with agreed.batches.again(phase=Phase.NOISE) as batches:
                self.noise = noise.measure(
                    run.gradients,
                    batches,
                    num=run.plan.batch.accumulation_steps,
                    totals=batches.totals,
                    samples=run.plan.batch.micro_batch,
                )
            self.clock.leave_out()
        if is_recorded(run, agreed, step=run.step + 1):
            self.recorder = Recorder(state=run.gradients, optimizer=run.optimizer)
            self.recorder.begin()
        run.optimizer.observer = self.recorder

    def after_step(self, result: StepResult | None) -> None:
        """Write the record, which answers a request that there was."""
        run = self.run
        if result is None:
            return
        if self.recorder is not None:
            run.at(Phase.RECORD)
            found = self.recorder.finish(run.step)
            if run.rank == 0:
                run.events.write(replace(found, noise=self.noise))
        self.clock.lap("optimizer_s")


def left_out(run: Run) -> str:
    """Return which parameters train and have no gradient, if they are most of the model; or ""."""
    views = [view for view in gradients.read(run.sharded.module) if view.status != "frozen"]
    unused = [view for view in views if view.status == "unused"]
    all_elements = sum(math.prod(view.shape) for view in views)
    share = sum(math.prod(view.shape) for view in unused) / max(1, all_elements)
    if share <= MOST_UNUSED:
        return ""
    names = ", ".join(view.name for view in unused[:3])
    return (
        f"{len(unused)} of {len(views)} parameters, {share:.0%} of what trains, have no gradient "
        f"in step {run.step + 1} ({names} …): no path leads to them from the loss"
    )


@dataclass(slots=True)
class LossSpikes:
    """The losses of the last 128 steps."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def check(self, loss: float) -> str | None:
        """Return a warning if `loss` is over 6 σ above the window's mean, and add it to the window.

        A loss that is not finite is not added; other code reports it.
        """
        if not math.isfinite(loss):
            return None
        warning = None
        if len(self.recent) >= MIN_STEPS:
            mean, sigma = statistics.fmean(self.recent), statistics.pstdev(self.recent)
            if loss > mean + SIGMAS * sigma > mean:
                warning = (
                    f"loss {loss:.4f} is {(loss - mean) / sigma:.0f} σ above the last "
                    f"{len(self.recent)} steps' {mean:.4f}"
                )
        self.recent.append(loss)
        return warning


@dataclass(slots=True)
class SkippedSteps:
    """Which of the last 20 steps made no update."""

    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=SKIP_WINDOW))
    warned: bool = False

    def check(self, skipped: bool, *, searching: bool) -> str | None:
        """Add a step; return a warning once, when most of the last 20 were skipped.

        `searching`: fp16 still looks for its first loss scale, for which steps have to be skipped.
        """
        if searching:
            return None
        self.recent.append(skipped)
        if self.warned or sum(self.recent) <= MOST_SKIPPED * SKIP_WINDOW:
            return None
        self.warned = True
        return (
            f"{sum(self.recent)} of the last {len(self.recent)} steps were skipped: loss or "
            "gradients were not finite, and the weights did not change"
        )


class StepRecords(Participant):
    """Writes one event per rank and step, and what the rank's memory and machine lack."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.pressure, self.spikes, self.skipped = PressureMeter(), LossSpikes(), SkippedSteps()
        self.baseline_bytes = 0
        """Resident bytes beside the model after building; 0 on CUDA, whose peaks count tensors."""
        if run.device.type == "cpu":
            self.baseline_bytes = max(0, memory_now()[0] - sum(lasting_bytes(run).values()))
        self.memory_recorded = False
        self.reserved_bytes = 0
        """Most bytes that torch's allocator kept on the GPU, as last written."""

    def after_step(self, result: StepResult | None) -> None:
        if result is None:
            return
        run, times = self.run, self.clock.times()
        rss, peak = memory_now()[0], highest_peak()
        self._record_step(result, {**times, "rss": rss, "peak": peak})
        if pressure := self.pressure.read(run.step):
            run.events.write(pressure)
        if is_recorded(run, result.agreed, step=run.step) or not self.memory_recorded:
            self._record_memory(peak)
        if torch.cuda.is_initialized():
            self._record_device_memory()
        if run.rank == 0 and (warning := self.spikes.check(result.agreed.loss)):
            run.events.write(Note(step=run.step, text=f"step {run.step}: {warning}"))
        scale = run.loss_scale
        searching = scale.can_fall and not run.optimizer.steps
        warning = self.skipped.check(result.lr is None, searching=searching)
        if run.rank == 0 and warning:
            fix = "lower optim.lr, or correct what the notes before name"
            if scale.dynamic:
                fix = f"fp16 overflows at loss scale {scale.scale:g}: take train.precision=bf16"
            run.events.write(Note(step=run.step, text=f"step {run.step}: {warning}; {fix}"))

    def _record_step(self, result: StepResult, measured: dict[str, Any]) -> None:
        """Write one event per rank; rank 0 adds what all ranks agreed on."""
        run, agreed = self.run, result.agreed
        indices = range(run.plan.batch.accumulation_steps)
        samples = [i for index in indices for i in run.train_data.ids(run.batch_index - 1, index)]
        if not run.plan.ranks.is_first(run.rank, *SAMPLES):
            samples = []
        values = {**measured, "samples": samples}
        if run.rank == 0:
            values |= {
                "loss": agreed.loss,
                "tokens": agreed.tokens,
                "tokens_per_s": agreed.tokens / measured["step_s"],
                "grad_norm": agreed.grad_norm,
                "clip_ratio": run.gradients.clip_ratio,
                "lr": result.lr,
                "optimizer_steps": run.optimizer.steps,
                "total_micro_batches": run.history.micro_batches,
                "skipped": result.lr is None,
            }
        run.events.write(
            Step(step=run.step, micro_batches=agreed.batches.totals.micro_batches, **values)
        )

    def _record_memory(self, peak: int) -> None:
        """Write the bytes that this rank held at its peak, by category of the memory breakdown.

        The remainder counts as activations: they, whole parameters and gradients, and all else that
        exists only within a step. With tiers there is no such event, because tensors on disk are
        not memory.
        """
        run = self.run
        if run.tiers is not None or run.optimizer.torch is None:
            return
        grads = [p.grad for p in module_tree.parameters(run.sharded.module) if p.grad is not None]
        held = {
            **lasting_bytes(run),
            "gradients": sum(local_part(grad).nbytes for grad in grads),
            "baseline": self.baseline_bytes,
        }
        self.memory_recorded = True
        rest = max(0, peak - sum(held.values()))
        run.events.write(PeakMemory(step=run.step, **held, activations=rest))

    def _record_device_memory(self) -> None:
        """Write what torch's allocator kept at most and what the device says, when it is more."""
        reserved = torch.cuda.max_memory_reserved()
        if reserved > self.reserved_bytes:
            self.reserved_bytes = reserved
            free, total = torch.cuda.mem_get_info()
            outside = max(0, total - free - torch.cuda.memory_reserved())
            self.run.events.write(
                DeviceMemory(step=self.run.step, reserved=reserved, free=free, outside=outside)
            )


def lasting_bytes(run: Run) -> dict[str, int]:
    """Return the bytes that this rank holds of the model between two steps, gradients excluded."""
    model = run.sharded.module
    states = run.optimizer.torch.state.values() if run.optimizer.torch is not None else ()
    return {
        "parameters": sum(local_part(p).nbytes for _, p in run.sharded.named_parameters()),
        "optimizer": sum(
            local_part(value).nbytes
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
    }


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, or on CPU in a process with a limit (ulimit -v)."""
    refused = "DefaultCPUAllocator: can't allocate memory" in message_of(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or refused


def record_failure(
    events: EventWriter, error: BaseException, phase: Phase, step: int, stage: int | None = None
) -> int:
    """Write the event for a failure of this rank in `step` (from 1); returns its exit code.

    Where another rank was lost, that is the failure, whatever was raised because of it.
    """
    text = "".join(traceback.format_exception(error))
    error = peer_lost_in(error) or error
    if ran_out_of_memory(error):
        error = ColotrainError(f"memory ran short: {message_of(error)}", FIX_MEMORY)
    told = described(error)
    traceback_text = shortened(text, MOST_WRITTEN)  # all of it is in the rank's log
    failure = Failure(phase=phase, step=step, stage=stage, error=told, traceback=traceback_text)
    events.write(failure)
    sys.stderr.write(text)
    if not isinstance(error, ColotrainError):
        return FAILED
    return WORKER_USAGE if error.exit_code == USAGE else WORKER_FINAL
