"""A thread beside training: it says how far a long step is, and leaves the step to stop the run.

Parameters and optimizer state stay as they are until a step's update. The state of the last
finished step can therefore be saved at any moment while the next step is computed, and a rank that
is asked to stop has to wait for nothing: not for the end of a micro-batch, which may take minutes,
and not for a rank that hangs.

An unfinished step is left by all ranks or by none. A rank may decide to leave only before it enters
the all-reduce that ends the forward and backward passes of a step (`loop.agree`). That all-reduce
then never completes on any rank, so that no rank updates its parameters. The rank announces its
decision through the store; the others, wherever they are, read it there and leave as well. Nothing
is exchanged while nobody wants to stop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from colotrain.engine import checkpoint
from colotrain.engine.manifest import Manifest
from colotrain.engine.recording import record_failure
from colotrain.engine.saving import own_store
from colotrain.engine.shard_file import Piece

if TYPE_CHECKING:
    from colotrain.engine.loop import Run

LONG_STEP_S = 2.0
"""A step shorter than this is always finished, and nothing is said of its progress."""
PATIENCE_S = 5.0
"""How long an unfinished step may still take when the run is asked to stop."""
LOOK_EVERY_S = 0.5
FOLLOW_EVERY_S = 2.0
"""Between looks whether another rank has left the step."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 10.0
"""Between two events about the progress of a step."""
ALMOST = 0.99
"""A micro-batch that takes longer than it should is still not done."""
LEAVE_TOGETHER_S = 30.0
"""How long a rank that has saved waits for the others to say that they have, too."""
LEFT = "colotrain/step-left"
"""Key of the store: `STEP REASON`, once a rank has left the step after STEP finished ones."""
DEPARTED = "colotrain/departed"
"""Key of the store: how many ranks have saved and are about to exit."""


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
class StepMonitor:
    """Watches the steps of one rank once it was started; until then it does nothing."""

    run: Run | None = None
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
    asked_at: float | None = None
    told_at: float = 0.0
    followed_at: float = 0.0
    follows: bool = False
    """Another rank has left the step."""
    seen: tuple[int, int] = (0, 0)
    """Calls and micro-batches at the last look: what moves is alive."""

    def start(self, run: Run) -> None:
        self.run = run
        threading.Thread(target=self._watch, name="step-monitor", daemon=True).start()

    # -- called by training

    @contextlib.contextmanager
    def interruptible(self, run: Run, what: str = "step") -> Iterator[None]:
        """In here training may be left for good. All ranks must call, at the same step."""
        self.began, self.forward_s = time.perf_counter(), None
        if self.run is not None and self.is_long:
            pieces, manifest = unsaved_state(run)
            last = LastStep(
                step=run.step, pieces=pieces, manifest=manifest, what=what, began=self.began
            )
            with self.lock:
                self.last, self.undecided = last, True
        try:
            yield
        finally:  # also after an error: ranks that have left are lost to those that have not yet
            with self.lock:
                self.last = None

    def begin_agreement(self) -> None:
        """From here on the step is finished unless another rank has left it."""
        with self.lock:
            self.undecided = False

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def note_duration(self, seconds: float) -> None:
        """How long the step took, on which all ranks agree; so will the next one."""
        self.is_long = seconds > LONG_STEP_S

    def at_micro_batch(self, index: int, *, of: int, calls: int) -> None:
        """Micro-batch `index` (from 0) begins; `calls` of groups were made before it."""
        self.micro_batch_began = time.perf_counter()
        self.micro_batch, self.num_micro_batches, self.calls_before = index + 1, of, calls

    # -- the thread

    def _watch(self) -> None:
        assert self.run is not None
        if self.run.device.type == "cuda":  # which each thread chooses for itself
            torch.cuda.set_device(self.run.device)
        store = own_store()
        with contextlib.suppress(dist.DistStoreError):  # rank 0 is gone, and so is this attempt
            while True:
                time.sleep(LOOK_EVERY_S)
                if self.last is not None:
                    self._look(self.run, self.last, store)

    def _look(self, run: Run, last: LastStep, store: Any) -> None:
        self._tell(run, last)
        reason = self._reason(run, last, store)
        if reason is None:
            return
        with self.lock:
            if self.last is last and (self.undecided or self.follows):
                self._leave(run, last, reason, store)

    def _tell(self, run: Run, last: LastStep) -> None:
        """Give a sign of life where training has moved, and say how far it is."""
        seen = len(run.sharded.calls), self.micro_batch
        if seen != self.seen:
            self.seen = seen
            run.heartbeat.beat(run.step + 1, run.phase)
        now = time.perf_counter()
        elapsed = now - last.began
        pause = min(max(SHORTEST_PAUSE_S, elapsed / 20), LONGEST_PAUSE_S)
        if run.rank != 0 or now - max(self.told_at, last.began) < pause:
            return
        self.told_at = now
        run.events.write(
            "progress",
            step=run.step + (last.what == "step"),
            what=last.what,
            micro_batch=self.micro_batch,
            micro_batches=self.num_micro_batches,
            done=self._share_done(run, last),
            seconds=elapsed,
        )

    def _share_done(self, run: Run, last: LastStep) -> float:
        """Share of the step, or of the evaluation, that is done, between 0 and 1.

        Of the first micro-batch the groups that were called tell how far its forward is, and how
        long that took tells how long backward takes; later ones are as long as those before.
        """
        done, inside_s = max(self.micro_batch - 1, 0), time.perf_counter() - self.micro_batch_began
        if done:
            whole_s = (self.micro_batch_began - last.began) / done
            return (done + min(inside_s / whole_s, ALMOST)) / self.num_micro_batches
        num_calls = len(run.sharded.calls) - self.calls_before
        forward = min(num_calls / max(len(run.sharded.groups), 1), 1.0)
        if forward == 1.0:
            self.forward_s = self.forward_s or inside_s
        inside = share_of_micro_batch(
            forward,
            inside_s / self.forward_s if self.forward_s else 0.0,
            recomputes=run.plan.train.activation_checkpointing != "none",
            forward_only=last.what == "evaluation",
        )
        return inside / self.num_micro_batches

    def _reason(self, run: Run, last: LastStep, store: Any) -> str | None:
        """Why this rank has to leave the step now; None where it has not."""
        now = time.monotonic()
        reason = run.wish()
        if reason is None:
            self.asked_at = None
        else:
            self.asked_at = self.asked_at or now
            patience_s = PATIENCE_S if run.stop_error is None else 0.0
            if self.undecided and now - self.asked_at >= patience_s:
                return reason
        if now - self.followed_at < FOLLOW_EVERY_S:
            return None
        self.followed_at = now
        if not store.check([LEFT]):
            return None
        step, _, reason = store.get(LEFT).decode().partition(" ")
        self.follows = int(step) == last.step
        return reason if self.follows else None

    def _leave(self, run: Run, last: LastStep, reason: str, store: Any) -> None:
        """Save the last finished step and end this process. Holds the lock; never returns."""
        code = 1
        try:
            store.set(LEFT, f"{last.step} {reason}")
            if run.rank == 0:
                where = f"micro-batch {self.micro_batch}/{self.num_micro_batches}"
                text = f"{_name(last)} is left at {where}; {_becomes(run, last)}"
                run.events.write("note", text=text)
            problem = self._save(run, last)
            error = run.stop_error or problem
            if error is None:
                run.events.write("stopped", step=last.step, reason=reason)
                code = 0
            else:
                code = record_failure(run.events, error, phase=run.phase, step=last.step + 1)
            _depart(store)
        except BaseException as error:
            code = record_failure(run.events, error, phase="leaving", step=last.step + 1)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _save(self, run: Run, last: LastStep) -> Exception | None:
        """Write what is not saved yet, and wait for what is being written."""
        run.at("checkpoint")
        on_side_stream: Any = contextlib.nullcontext()
        if run.device.type == "cuda":  # the default one is busy with the step
            on_side_stream = torch.cuda.stream(torch.cuda.Stream(run.device))
        if last.pieces is not None and last.manifest is not None:
            with on_side_stream:
                run.saver.begin(last.pieces, last.manifest, background=False)
        problem = run.saver.wait()
        if problem is None or not run.plan.checkpoint.enabled:
            return None
        return checkpoint.unsaved(run, last.step, problem)


def unsaved_state(run: Run) -> tuple[list[Piece] | None, Manifest | None]:
    """What a checkpoint of the steps done so far would hold; None where none is needed.

    What a forward may change (buffers) is copied. All ranks must call.
    """
    if not run.plan.checkpoint.enabled or run.step == 0 or run.saved_step == run.step:
        return None, None
    pieces = checkpoint.pieces(run)
    kept = [p if p.lasts else replace(p, local=p.local.clone(), is_copy=True) for p in pieces]
    return kept, checkpoint.manifest_of(run)


def share_of_micro_batch(
    forward: float, forwards: float, *, recomputes: bool, forward_only: bool
) -> float:
    """Share of a micro-batch that is done.

    `forward` is the share of its forward that is done; once that is all of it, `forwards` says how
    many times as long as the forward the micro-batch has taken. Backward takes twice the forward's
    time, and three times where it computes blocks again.
    """
    if forward_only:
        return min(forward, ALMOST)
    whole = 4 if recomputes else 3
    return min((forward if forward < 1 else max(forwards, 1.0)) / whole, ALMOST)


def _name(last: LastStep) -> str:
    return f"step {last.step + 1}" if last.what == "step" else f"the {last.what}"


def _becomes(run: Run, last: LastStep) -> str:
    """What is saved, and where `colotrain resume` goes on."""
    if not run.plan.checkpoint.enabled:
        return "nothing is saved (checkpoint.every=0)"
    if last.pieces is not None:
        return f"saving step {last.step}"
    if last.step:
        return f"step {last.step} is saved already"
    return "no step is finished, so there is nothing to save: a resumed run begins with step 1"


def _depart(store: Any) -> None:
    """Wait until all ranks are here: the process of rank 0 keeps the store, which others need."""
    deadline = time.monotonic() + LEAVE_TOGETHER_S
    with contextlib.suppress(Exception):  # the store is gone: rank 0 knows that all are here
        store.add(DEPARTED, 1)
        while store.add(DEPARTED, 0) < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
