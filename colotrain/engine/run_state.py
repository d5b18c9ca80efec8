"""The state of a training process: what the modules of the engine hand one another."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colotrain.data.read.loader import BatchLoader
from colotrain.engine.accumulation import Batch, StepTotals
from colotrain.engine.checkpoint.manifest import Manifest
from colotrain.engine.checkpoint.saving import Saver
from colotrain.engine.checkpoint.shard_file import Piece
from colotrain.engine.gradients.gradients import GradientState
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.engine.precision import LossScale
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.spikes import LossSpikes
from colotrain.errors import ColotrainError
from colotrain.events.heartbeats import Heartbeat
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The state of the last finished step, kept while the next step is computed."""

    step: int
    pieces: list[Piece] | None
    """What a checkpoint of it would hold; None where nothing needs to be saved."""
    manifest: Manifest | None
    what: str
    """What may be left: a step, or an evaluation."""
    began: float


@dataclass(slots=True)
class StepProgress:
    """How far this rank is in its step; training writes it, and the monitor's thread reads it."""

    is_long: bool = True
    """Whether steps take long enough to be left. Ranks agree on it; of the first it is assumed."""
    last: LastStep | None = None
    """Set while training may be interrupted."""
    undecided: bool = False
    """This rank may still decide by itself to leave the step."""
    micro_batch: int = 0
    """The micro-batch that is being computed, from 1."""
    num_micro_batches: int = 1
    micro_batch_began: float = 0.0
    forward_s: float | None = None
    """How long the forward of the first micro-batch took, once it is done."""
    calls_before: int = 0
    """How many groups had been called when that micro-batch began."""
    began: float = field(default_factory=time.perf_counter)
    lock: Any = field(default_factory=threading.Lock)
    """Whoever holds it decides what becomes of the step; a thread that leaves keeps it."""

    def begin_agreement(self) -> None:
        """From here on the step is finished unless another rank has left it."""
        with self.lock:
            self.undecided = False

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def at_micro_batch(self, index: int, *, of: int, calls: int) -> None:
        """Micro-batch `index` (from 0) begins; `calls` of groups were made before it."""
        self.micro_batch_began = time.perf_counter()
        self.micro_batch, self.num_micro_batches, self.calls_before = index + 1, of, calls


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything a worker holds while it trains."""

    plan: RunPlan
    rundir: RunDir
    rank: int
    device: torch.device
    sharded: ShardedModel
    optimizer: ShardOptimizer
    tiers: Tiers | None
    """Where model data rests; None where everything stays on the device."""
    gradients: GradientState
    nominal_targets: float
    """Targets of a step when none is masked."""
    sample: Batch | None
    """A batch of one, the same on every rank, where a trial forward is to show what is a target."""
    train_data: BatchLoader
    validation_data: BatchLoader | None
    events: EventWriter
    loss_scale: LossScale
    stop_requested: Callable[[], str | None]
    """A reason to stop that reached this rank, or None."""
    saver: Saver
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    progress: StepProgress = field(default_factory=StepProgress)
    is_monitored: bool = False
    """Whether a thread watches the steps, which may then be left unfinished."""
    on_gradients: Callable | None = None
    step: int = 0
    """Steps done."""
    micro_batches: int = 0
    phase: str = "start"
    stop_reason: str | None = None
    asked_here: str | None = None
    """Why something in this process wants the run to stop."""
    stop_error: ColotrainError | None = None
    """What the run fails with once it has saved and stopped; None: it may be resumed as it is."""
    spikes: LossSpikes = field(default_factory=LossSpikes)
    generators: dict[str, Tensor] | None = None
    """torch's generator at the beginning of the step."""
    checksums: dict[str, int] | None = None
    """Of this rank's state after the last update, where they are to be compared before the next."""
    best: tuple[int, float] | None = None
    """Step and value of the best evaluation so far, where its checkpoint is to be kept."""
    saved_step: int = -1
    can_be_saved: bool = False
    """Whether the state was found to be such that a checkpoint can hold it."""
    baseline_bytes: int = 0
    """Resident beside the model when all was built; 0 on CUDA: there peaks are those of tensors."""
    memory_is_told: bool = False
    restored: set[str] = field(default_factory=set)
    """Parameters that came from a checkpoint."""
    skipped_batches: int = 0
    """Global batches that rollbacks passed over."""
    rollbacks: int = 0
    must_roll_back: bool = False
    """The step that was just made was not finite, and the plan is to go back then."""

    def at(self, phase: str) -> None:
        """Say what this rank does now: for the event of a failure, and as a sign of life."""
        self.phase = phase
        self.heartbeat.beat(self.phase_step, phase)

    @property
    def phase_step(self) -> int:
        """The step that `phase` is part of: a checkpoint is of the last one that is done."""
        return self.step + (self.phase != "checkpoint")

    def ask_to_stop(self, reason: str, *, error: ColotrainError | None = None) -> None:
        """Save and end the run on all ranks, as soon as can be; any thread of any rank may call.

        A long step is left unfinished. With `error` nobody is given time to finish the step, and
        the run fails with it; otherwise it ends as after `colotrain stop`.
        """
        self.stop_error, self.asked_here = error, reason

    def wish(self) -> str | None:
        """Why this rank wants the run to stop; None where it does not."""
        return self.asked_here or self.stop_requested()

    @property
    def batch_index(self) -> int:
        """Which global batch of the data's order the next step reads."""
        return self.step + self.skipped_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step as all ranks agreed on it."""

    loss: float
    tokens: float
    grad_norm: float
    stop: bool
    record: bool
    """Statistics of every gradient are due."""
    settle: bool
    """A rank is short of memory, or the first step has shown what is needed beside model data."""
    noise: bool
    """Gradient noise was asked for, too."""
    save: bool
    """A checkpoint is due."""
    totals: StepTotals = field(repr=False)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)
