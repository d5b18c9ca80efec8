"""The state of a training process, which the engine's modules share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from colotrain.data.read.loader import BatchLoader
from colotrain.engine.accumulation import Batch
from colotrain.engine.checkpoint.manifest import Evaluations, Manifest
from colotrain.engine.checkpoint.memory_copy import MemoryCopies
from colotrain.engine.checkpoint.saving import Saver
from colotrain.engine.checkpoint.shard_file import Piece
from colotrain.engine.gradients.gradients import GradientState
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.engine.precision import LossScale
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.spans import enter_phase
from colotrain.errors import ColotrainError
from colotrain.events.heartbeats import HeartbeatWriter
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.phases import AFTER_A_STEP, Phase
from colotrain.spec.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The state of the last finished step, kept while the next step is computed."""

    step: int
    pieces: list[Piece] | None
    """Content of a checkpoint of the step; None where nothing needs to be saved."""
    manifest: Manifest | None
    what: str
    """What may be left unfinished: "step" or "evaluation"."""
    began: float


@dataclass(slots=True)
class StepProgress:
    """Progress of this rank in its step; training writes it and the monitor's thread reads it."""

    is_long: bool = True
    """Whether steps are long enough to be left; ranks agree on it. The first one counts as long."""
    last: LastStep | None = None
    """The last finished step; not None only while training may be interrupted."""
    undecided: bool = False
    """Whether this rank may still decide by itself to leave the step."""
    micro_batch: int = 0
    """Number of the current micro-batch in the step, from 1."""
    num_micro_batches: int = 1
    micro_batch_began: float = 0.0
    forward_s: float | None = None
    """Seconds that the forward of the first micro-batch took, once it is done."""
    calls_before: int = 0
    """Number of group calls before that micro-batch."""
    began: float = field(default_factory=time.perf_counter)
    lock: Any = field(default_factory=threading.Lock)
    """Lock of the decision about the step; a thread that leaves the step keeps it."""

    def begin_agreement(self) -> None:
        """Note that the step is from here on finished, unless another rank has left it."""
        with self.lock:
            self.undecided = False

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def at_micro_batch(self, index: int, *, of: int, calls: int) -> None:
        """Note that micro-batch `index` (from 0) begins, after `calls` calls of groups."""
        self.micro_batch_began = time.perf_counter()
        self.micro_batch, self.num_micro_batches, self.calls_before = index + 1, of, calls


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything that a worker holds while it trains."""

    plan: RunPlan
    rundir: RunDir
    rank: int
    device: torch.device
    sharded: ShardedModel
    optimizer: ShardOptimizer
    tiers: Tiers | None
    """Tiers of parameters, gradients and optimizer state; None where all stay on the device."""
    gradients: GradientState
    nominal_targets: float
    """Targets of a step when none is masked."""
    trial: Batch
    """Batch of a few samples, the same on every rank, with which trial forwards find targets."""
    train_data: BatchLoader
    validation_data: BatchLoader | None
    events: EventWriter
    loss_scale: LossScale
    stop_requested: Callable[[], str | None]
    """Function that returns a reason to stop that reached this rank, or None."""
    saver: Saver
    sources: dict[str, str] = field(default_factory=dict)
    """Identities of the data and models that are read; on rank 0, which writes manifests."""
    files_in_place: dict[Path, str] = field(default_factory=dict)
    """Token files that are read where they are, with their versions; on rank 0."""
    copies: MemoryCopies | None = None
    """Copies of the state in the launcher's memory; None where there are none."""
    heartbeat: HeartbeatWriter = field(default_factory=HeartbeatWriter)
    progress: StepProgress = field(default_factory=StepProgress)
    is_monitored: bool = False
    """Whether a thread watches the steps, which may then be left unfinished."""
    metrics: Callable[[Batch, Any], Any] | None = None
    """The function `train.metrics`."""
    metric_weights: dict[str, str] | None = None
    """What metrics without a count are means over; None where that is not known."""
    step: int = 0
    """Number of steps done."""
    micro_batches: int = 0
    phase: Phase = Phase.START
    stop_reason: str | None = None
    asked_here: str | None = None
    """Reason for which code in this process wants the run to stop."""
    stop_error: ColotrainError | None = None
    """Error that the run raises once it has saved; None where it just stops."""
    best: tuple[int, float] | None = None
    """Step and value of the best evaluation so far, where its checkpoint is to be kept."""
    evaluations: Evaluations = field(default_factory=lambda: Evaluations(last_step=-1))
    """The evaluations so far, by `train.stop_early`."""
    saved_step: int = -1
    can_be_saved: bool = False
    """Whether the state was checked and a checkpoint can hold it."""
    restored: set[str] = field(default_factory=set)
    """Names of the parameters that came from a checkpoint."""
    skipped_batches: int = 0
    """Global batches that rollbacks skipped."""
    rollbacks: int = 0

    def at(self, phase: Phase) -> None:
        """Note what this rank does now, for the event of a failure, and send a heartbeat."""
        self.phase = phase
        enter_phase(phase)
        self.beat()

    def beat(self) -> None:
        self.heartbeat.beat(self.phase_step, self.phase)

    @property
    def phase_step(self) -> int:
        """Step that `phase` is part of, from 1; what follows a step belongs to the finished one."""
        return self.step + (self.phase not in AFTER_A_STEP)

    def ask_to_stop(self, reason: str, *, error: ColotrainError | None = None) -> None:
        """Save and end the run on all ranks as soon as possible. Any thread of any rank may call.

        A long step is left unfinished. With `error` the step gets no time to finish, and the run
        fails with the error; otherwise the run ends as after `colotrain stop`.
        """
        self.stop_error, self.asked_here = error, reason

    def reason_to_stop(self) -> str | None:
        """Return why this rank wants the run to stop; None where it does not."""
        return self.asked_here or self.stop_requested()

    @property
    def batch_index(self) -> int:
        """Index, in the data's order, of the global batch that the next step reads."""
        return self.step + self.skipped_batches
