"""The state of a training process, which the engine's modules share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from colotrain.data.read.loader import BatchLoader
from colotrain.engine.gradients.accumulation import Batch
from colotrain.engine.gradients.gradients import GradientState
from colotrain.engine.model.precision import LossScale
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.sharding.spans import enter_phase
from colotrain.engine.state.manifest import History
from colotrain.engine.state.memory_copy import MemoryCopies
from colotrain.engine.state.saving import Saver
from colotrain.engine.state.shard_file import State
from colotrain.errors import ColotrainError
from colotrain.events.heartbeats import HeartbeatWriter
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.axes import CP, TP
from colotrain.spec.phases import AFTER_A_STEP, Phase
from colotrain.spec.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The state of the last finished step, kept while the next step is computed."""

    step: int
    state: State | None
    """Content of a checkpoint of the step; None where nothing needs to be saved."""
    what: str
    """What may be left unfinished: "step" or "evaluation"."""
    began: float


@dataclass(slots=True)
class StepProgress:
    """Progress of this rank in its step; training writes it and the monitor's thread reads it."""

    is_long: bool = True
    """Whether steps are long enough to be left; ranks agree on it. The first one counts as long."""
    is_watched: bool = False
    """Whether a thread watches the steps, which may then be left unfinished."""
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


@dataclass(slots=True)
class Stop:
    """Whether this rank wants the run to stop, and why the ranks do."""

    requested: Callable[[], str | None]
    """Function that returns a reason that reached this rank from outside, or None."""
    reason: str | None = None
    """Why this rank wanted to stop when the ranks last agreed on it."""
    asked_here: str | None = None
    """Reason for which code in this process wants the run to stop."""
    error: ColotrainError | None = None
    """Error that the run raises once it has saved; None where it just stops."""

    def ask(self, reason: str, *, error: ColotrainError | None = None) -> None:
        """Save and end the run on all ranks as soon as possible. Any thread of any rank may call.

        A long step is left unfinished. With `error` the step gets no time to finish, and the run
        fails with the error; otherwise the run ends as after `colotrain stop`.
        """
        self.error, self.asked_here = error, reason

    def wanted(self) -> str | None:
        """Return why this rank wants the run to stop; None where it does not."""
        return self.asked_here or self.requested()


@dataclass(slots=True)
class Targets:
    """What the loss of a step is a mean over."""

    nominal: float
    """Targets of a step when none is masked."""
    samples: Batch
    """A few samples, the same on every rank, with which trial forwards find targets."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything that a worker holds while it trains."""

    plan: RunPlan
    rundir: RunDir
    rank: int
    device: torch.device
    sharded: ShardedModel
    optimizer: ShardOptimizer
    gradients: GradientState
    targets: Targets
    train_data: BatchLoader
    validation_data: BatchLoader | None
    events: EventWriter
    loss_scale: LossScale
    stop: Stop
    saver: Saver
    copies: MemoryCopies | None = None
    """Copies of the state in the launcher's memory; None where there are none."""
    heartbeat: HeartbeatWriter = field(default_factory=HeartbeatWriter)
    progress: StepProgress = field(default_factory=StepProgress)
    history: History = field(default_factory=History)
    step: int = 0
    """Number of steps done."""
    phase: Phase = Phase.START

    @property
    def tiers(self) -> Tiers | None:
        """Tiers of parameters, gradients and optimizer state; None where all stay on the device."""
        return self.optimizer.tiers

    def counts(self, *, whole: bool) -> bool:
        """Whether what this rank has of its samples counts: ranks beside it have the same.

        `whole`: whether it is of whole samples, although ranks may divide them.
        """
        return self.plan.ranks.is_first(self.rank, *((CP, TP) if whole else (TP,)))

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

    @property
    def batch_index(self) -> int:
        """Index, in the data's order, of the global batch that the next step reads."""
        return self.step + self.history.skipped_batches
