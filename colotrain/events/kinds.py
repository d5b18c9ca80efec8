"""The event kinds: one dataclass per kind, which is both written and read."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from colotrain.events.event import READ_ONLY, WRITE_ONLY, EventKind, event_kind
from colotrain.records import same_fields
from colotrain.spec.exit_codes import signal_name
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.phases import Phase


@event_kind("launch")
class LaunchStarted(EventKind):
    """A command began to launch workers."""

    pid: int
    host: str
    world_size: int
    began_at: float | None
    """Unix time at which the command began, before it resolved the plan."""


@event_kind("done")
class LaunchEnded(EventKind):
    """The launch is over, and with it the run unless it is resumed."""

    status: str
    """One of `view.ENDED`."""
    exit_code: int
    cause: str


@event_kind("restart")
class Restart(EventKind):
    """An attempt failed, and the next one begins."""

    cause: str


@event_kind("death")
class WorkerExit(EventKind):
    """Exit of one worker process, which another node's launcher reports to the head node."""

    rank: int
    exit_code: int
    log: str
    last_line: str = ""
    """Last line of the worker's log."""
    out_of_memory: bool = False
    """Whether the kernel has killed processes for lack of memory since the launch."""
    gave_up: bool = False
    """Whether NCCL's watchdog aborted the rank because another rank never joined a collective."""
    gpu_errors: str | None = None
    """What the driver reported about the host's GPUs in the attempt, if anything."""
    round: int = 0
    """Number of the round in which it ran, which all nodes count alike."""

    @property
    def killed_by(self) -> str | None:
        return None if self.exit_code >= 0 else signal_name(-self.exit_code)


@event_kind("note")
class Note(EventKind):
    """A message for the user, from a worker or the launcher."""

    step: int | None = None
    text: str


@event_kind("started")
class WorkerStarted(EventKind):
    """A worker is ready to train."""

    rank: int
    world_size: int
    attempt: int
    pid: int
    host: str
    device: str
    log: str
    """Path of the worker's log; empty if it has none."""
    step: int
    """Steps that are done."""
    stage: int | None = None
    """Pipeline stage of the rank; None where each rank has all blocks."""


@event_kind("stopped")
class WorkerStopped(EventKind):
    """A worker saved and left before the last step."""

    step: int
    reason: str


@event_kind("finished")
class WorkerFinished(EventKind):
    """A worker did the last step."""

    step: int
    reason: str | None = None
    """Why there were fewer steps than planned; None: there were not."""


@event_kind("failed")
class Failure(EventKind):
    """Failure of one rank."""

    rank: int = field(default=0, metadata=READ_ONLY)
    attempt: int = field(default=0, metadata=READ_ONLY)
    phase: Phase | None
    step: int
    """Step that failed, from 1."""
    stage: int | None = None
    """Pipeline stage of the rank; None where each rank has all blocks."""
    error: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.phase or 'unknown phase'}, step {self.step}: {self.error}"


@event_kind("peak_flops")
class PeakFlops(EventKind):
    """Measured peak of a rank's device."""

    flops_per_s: float | None
    what: str
    """What was measured: "measured bf16 matmul"."""


@event_kind("case")
class CaseDone(EventKind):
    """One case of a verification was trained."""

    name: str


@event_kind("step")
class Step(EventKind):
    """One step on one rank. Rank 0's has what all ranks agreed on; there is none on the others."""

    attempt: int = field(default=0, metadata=READ_ONLY)
    step: int
    step_s: float | None
    data_s: float | None
    compute_s: float | None
    """Seconds in forward and backward, with the collectives inside them."""
    reduce_s: float | None
    """Seconds from the end of backward until all ranks have agreed on the step."""
    optimizer_s: float | None
    """On a GPU the update of the step before, which the GPU computes within this step's time."""
    copy_s: float | None = None
    """Seconds in which the state was copied to the launcher's memory."""
    wait_s: float | None = None
    """Seconds of the step in which the rank waited for other ranks; None where they are not known.

    On a GPU the wait is hidden in collectives that the GPU carries out.
    """
    micro_batches: int
    samples: list[int] = field(metadata=WRITE_ONLY)
    """Positions of this rank's samples in the data."""
    rss: int
    """Resident memory in bytes."""
    peak: int
    """Peak memory in bytes."""
    loss: float | None = None
    tokens: float | None = None
    """Targets summed over all ranks: tokens, samples, or what the model counts."""
    tokens_per_s: float | None = None
    grad_norm: float | None = None
    clip_ratio: float | None = None
    lr: float | None = None
    """Learning rate of the update; None where the step was skipped."""
    optimizer_steps: int | None = None
    """Optimizer steps since the beginning of the run."""
    total_micro_batches: int | None = None
    """Micro-batches of all ranks since the beginning of the run."""
    skipped: bool | None = None

    @property
    def known_wait_s(self) -> float | None:
        """Seconds of waiting for other ranks: where they are not known, those at the step's end."""
        return self.reduce_s if self.wait_s is None else self.wait_s

    @property
    def busy_s(self) -> float:
        """Seconds without the wait for other ranks, as far as that is known."""
        if self.wait_s is not None and self.step_s is not None:
            return max(0.0, self.step_s - self.wait_s)
        if self.compute_s is None:
            return self.step_s or 0.0
        return self.compute_s + (self.data_s or 0.0)


@event_kind("traced")
class Traced(EventKind):
    """A rank wrote a trace of some of its steps."""

    first: int
    last: int
    path: str


@event_kind("progress")
class StepProgress(EventKind):
    """Progress within a step or evaluation that takes long."""

    step: int
    """Step that is being computed, or after which the evaluation runs."""
    what: str = "step"
    """"step" or "evaluation"."""
    micro_batch: int
    """Micro-batch that is being computed, from 1."""
    micro_batches: int
    done: float
    """Fraction that is done, between 0 and 1."""
    seconds: float
    """Seconds since the step or evaluation began."""

    @property
    def whole_s(self) -> float | None:
        """Estimated total seconds at the rate so far; None while nothing is done."""
        return self.seconds / self.done if self.done > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds from `t` to the end; None while nothing is done."""
        return None if self.whole_s is None else max(0.0, self.whole_s - self.seconds)


@event_kind("eval")
class Evaluation(EventKind):
    """A validation loss."""

    step: int
    loss: float | None
    tokens: float
    metrics: dict[str, float] | None = None
    """Metrics that the model returned beside the loss, if any."""
    best: bool | None = None
    """True if no evaluation before was better by the plan's metric."""


@event_kind("memory")
class PeakMemory(EventKind):
    """Bytes of a rank at its peak."""

    step: int
    parameters: int
    optimizer: int
    buffers: int
    gradients: int
    baseline: int
    activations: int

    def breakdown(self) -> MemoryBreakdown:
        return MemoryBreakdown(**same_fields(self, MemoryBreakdown))


@event_kind("device_memory")
class DeviceMemory(EventKind):
    """What a rank's GPU holds, written whenever torch's allocator keeps more than before."""

    step: int
    reserved: int
    """Most bytes that torch's allocator kept (`torch.cuda.max_memory_reserved`)."""
    free: int
    """Bytes that the device says are free."""
    outside: int
    """Bytes outside torch's allocator: the CUDA context, NCCL, other processes on the device."""


@event_kind("tiers")
class TierBytes(EventKind):
    """Where gemini places the bytes of a rank."""

    step: int
    bytes: dict[str, dict[str, int]]
    """Category (parameters, gradients, optimizer) → tier → bytes."""
    need: dict[str, int]
    """Tier → bytes needed at once."""
    other: dict[str, Any]
    """Memory besides the model's."""
    moved_bytes: Any
    fits: bool
    budget: dict[str, Any]


@event_kind("nonfinite")
class Nonfinite(EventKind):
    """Origin of the first non-finite number; `step` alone if a second pass found nothing."""

    step: int
    rank: int | None = None
    """Rank where it arose."""
    micro_batch: int | None = None
    """Micro-batch within the step, from 1."""
    phase: str = ""
    module: str | None = None
    parameter: str | None = None
    samples: list[int] | None = None
    """Samples of that micro-batch with values that are not finite, or else all of them."""
    input: str | None = None
    """Name of the batch's tensor that is not finite itself."""

    def fields(self) -> dict[str, Any]:
        names = [name for name, _ in self._WRITTEN]
        return {name: getattr(self, name) for name in (names if self.phase else ["step"])}

    def __str__(self) -> str:
        """Return text like `blocks.1.mlp in backward of step 5, rank 1, micro-batch 3`."""
        if self.rank is None:
            return f"step {self.step}, in which a second pass met nothing"
        what = self.module or self.parameter or "the model itself"
        return f"{what} in {self.phase} of step {self.step}, rank {self.rank}{self._batch()}"

    def _batch(self) -> str:
        return f", micro-batch {self.micro_batch}" if self.micro_batch else ""


@event_kind("corruption")
class CorruptionFound(EventKind):
    """Ranks disagree about values that they share."""

    step: int
    persistent: bool
    """Whether a second comparison found it again."""
    found: list[str]


@event_kind("rollback")
class Rollback(EventKind):
    """Training went back to a checkpoint because a loss or gradient was not finite."""

    step: int
    """Step of the checkpoint."""
    left_at: int
    """Step that was not finite."""
    text: str

    @property
    def lost_steps(self) -> int:
        """Finished steps that had to be made again."""
        return self.left_at - 1 - self.step

    @property
    def route(self) -> str:
        return f"from step {self.left_at} back to step {self.step}"


@event_kind("checkpoint_started")
class CheckpointStarted(EventKind):
    """A checkpoint is being written."""

    step: int
    bytes: int
    """Bytes that rank 0 writes."""


@event_kind("checkpoint_failed")
class CheckpointFailed(EventKind):
    """A checkpoint could not be written; training goes on."""

    step: int
    error: str
    seconds: float | None


@event_kind("checkpoint")
class Checkpoint(EventKind):
    """A checkpoint was saved."""

    step: int
    path: str
    seconds: float | None
    """Seconds that saving took; None if it was only resumed from."""
    stall_s: float
    """Seconds of `seconds` during which training stood still."""


@event_kind("resumed")
class Resumed(EventKind):
    """Training goes on from a checkpoint, or from a copy in the launcher's memory."""

    step: int
    path: str
    in_memory: bool | None = None
    """True for a copy in memory, which has no path."""


@event_kind("memory_copy")
class MemoryCopied(EventKind):
    """The state is copied to the launcher's memory; written as copies begin or change their pace.

    Workers that die are started again from there.
    """

    step: int
    bytes: int
    """Bytes of rank 0's copy."""
    seconds: float
    """Seconds for which this copy held rank 0 up."""
    every: int
    """Steps between two copies."""
