"""A thread beside training that reports the progress of a long step and can leave it unfinished.

Parameters and optimizer state do not change until a step's update. The state of the last finished
step can therefore be saved at any moment while the next step is computed. So a rank that is asked
to stop need not wait for the end of a micro-batch, which may take minutes, nor for a rank that
hangs.

An unfinished step is left by all ranks or by none. A rank may decide to leave only before it enters
the all-reduce that ends the forward and backward passes of a step (`train.agree`). That all-reduce
then never completes on any rank, so that no rank updates its parameters. The rank announces its
decision through the store, signed (`engine.comms.notes`); the other ranks read it there and leave
as well. While no rank wants to stop, nothing is exchanged.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from colotrain.engine.comms.notes import Notes
from colotrain.engine.comms.process import patience_s
from colotrain.engine.state import checkpoint
from colotrain.engine.state.run_state import LastStep, Run
from colotrain.engine.state.shard_file import State
from colotrain.engine.step.participant import Agreed, Ask, Mean, Participant, StepResult
from colotrain.engine.step.recording import record_failure
from colotrain.events import kinds
from colotrain.spec.phases import Phase
from colotrain.timeouts import AwakeTimeout

LONG_STEP_S = 2.0
"""Seconds; a step shorter than this is always finished, without progress events."""
PATIENCE_S = 5.0
"""Seconds that an unfinished step may still take when the run is asked to stop."""
CHECK_EVERY_S = 0.5
FOLLOW_EVERY_S = 2.0
"""Seconds between checks whether another rank has left the step."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 10.0
"""Seconds between two events about the progress of a step."""
ALMOST = 0.99
"""Largest fraction of a micro-batch that is reported as done while it still runs."""
LEAVE_TOGETHER_S = 30.0
"""Seconds for which a rank that has saved waits for the others to save, too."""
LEFT = "colotrain/step-left"
"""Note of `STEP REASON`, written once a rank has left the step after STEP finished ones."""
DEPARTED = "colotrain/departed"
"""Note that all ranks have saved and may exit; with `/` and a rank, that this one has."""


def start(run: Run) -> None:
    """Start to watch the steps of this rank; until then `interruptible` has no effect."""
    run.progress.is_watched = True
    threading.Thread(target=Monitor(run).watch, name="step-monitor", daemon=True).start()


@contextlib.contextmanager
def interruptible(run: Run, what: str = "step") -> Iterator[None]:
    """Allow the process to be ended in this context. All ranks must enter it at the same step."""
    progress = run.progress
    progress.began, progress.forward_s = time.perf_counter(), None
    if run.progress.is_watched and progress.is_long:
        state = unsaved_state(run)
        last = LastStep(step=run.step, state=state, what=what, began=progress.began)
        with progress.lock:
            progress.last, progress.undecided = last, True
    try:
        yield
    finally:  # also after an error: ranks that have left are gone for those that have not
        with progress.lock:
            progress.last = None


class StepDurations(Participant):
    """Expects the next step to last as long: whether it may be left, and when a rank is silent."""

    def asks(self) -> Mapping[str, Ask]:
        # a GPU has not done yet what the host has queued: of it, the step before is known
        gpu_s = self.clock.step_s
        return {"step_s": Mean(self.run.progress.elapsed_s() if gpu_s is None else gpu_s)}

    def before_update(self, agreed: Agreed) -> None:
        self.run.progress.is_long = agreed["step_s"] > LONG_STEP_S

    def after_step(self, result: StepResult | None) -> None:
        if result is not None:  # only a first step is slow
            self.run.heartbeat.patience_s = patience_s(self.run.plan, self.clock.laps)


class Monitor:
    """The thread that watches the steps of this rank."""

    def __init__(self, run: Run) -> None:
        self.run, self.progress = run, run.progress
        self.asked_at: float | None = None
        self.reported_at = self.followed_at = 0.0
        self.follows = False
        """Whether another rank has left the step."""
        self.seen = (0, 0)
        """Calls and micro-batches at the last check; if they change, training is alive."""

    def watch(self) -> None:
        if self.run.device.type == "cuda":  # each thread has its own current device
            torch.cuda.set_device(self.run.device)
        notes = Notes()
        with contextlib.suppress(dist.DistStoreError):  # rank 0 is gone, and this attempt with it
            while True:
                time.sleep(CHECK_EVERY_S)
                if self.progress.last is not None:
                    self._check(self.run, self.progress.last, notes)

    def _check(self, run: Run, last: LastStep, notes: Notes) -> None:
        self._report_progress(run, last)
        reason = self._reason(run, last, notes)
        if reason is None:
            return
        with self.progress.lock:
            if self.progress.last is last and (self.progress.undecided or self.follows):
                self._leave(run, last, reason, notes)

    def _report_progress(self, run: Run, last: LastStep) -> None:
        """Send a heartbeat if training has progressed, and write how far it is."""
        seen = len(run.sharded.calls), self.progress.micro_batch
        if seen != self.seen:
            self.seen = seen
            run.beat()
        now = time.perf_counter()
        elapsed = now - last.began
        pause = min(max(SHORTEST_PAUSE_S, elapsed / 20), LONGEST_PAUSE_S)
        if run.rank != 0 or now - max(self.reported_at, last.began) < pause:
            return
        self.reported_at = now
        run.events.write(
            kinds.StepProgress(
                step=run.step + (last.what == "step"),
                what=last.what,
                micro_batch=self.progress.micro_batch,
                micro_batches=self.progress.num_micro_batches,
                done=self._share_done(run, last),
                seconds=elapsed,
            )
        )

    def _share_done(self, run: Run, last: LastStep) -> float:
        """Return the fraction of the step, or of the evaluation, that is done.

        In the first micro-batch, the number of groups called shows the progress of forward, and
        forward's duration gives that of backward. Later micro-batches are assumed to take as long
        as those before.
        """
        at = self.progress
        done, inside_s = (
            max(at.micro_batch - 1, 0),
            time.perf_counter() - at.micro_batch_began,
        )
        if done:
            whole_s = (at.micro_batch_began - last.began) / done
            return (done + min(inside_s / whole_s, ALMOST)) / at.num_micro_batches
        num_calls = len(run.sharded.calls) - at.calls_before
        forward = min(num_calls / max(len(run.sharded.groups), 1), 1.0)
        if forward == 1.0:
            at.forward_s = at.forward_s or inside_s
        inside = share_of_micro_batch(
            forward,
            inside_s / at.forward_s if at.forward_s else 0.0,
            recomputes=run.plan.train.activation_checkpointing != "none",
            forward_only=last.what == "evaluation",
        )
        return inside / at.num_micro_batches

    def _reason(self, run: Run, last: LastStep, notes: Notes) -> str | None:
        """Return why this rank must leave the step now; None where it need not."""
        now = time.monotonic()
        reason = run.stop.wanted()
        if reason is None:
            self.asked_at = None
        else:
            self.asked_at = self.asked_at or now
            patience_s = PATIENCE_S if run.stop.error is None else 0.0
            if self.progress.undecided and now - self.asked_at >= patience_s:
                return reason
        if now - self.followed_at < FOLLOW_EVERY_S:
            return None
        self.followed_at = now
        if (left := notes.read(LEFT)) is None:
            return None
        step, _, reason = left.partition(" ")
        self.follows = int(step) == last.step
        return reason if self.follows else None

    def _leave(self, run: Run, last: LastStep, reason: str, notes: Notes) -> None:
        """Save the last finished step and end this process. Holds the lock; never returns."""
        code = 1
        try:
            notes.write(LEFT, f"{last.step} {reason}")
            if run.rank == 0:
                at = self.progress
                where = f"micro-batch {at.micro_batch}/{at.num_micro_batches}"
                text = f"{_name(last)} is left at {where}; {_becomes(run, last)}"
                run.events.write(kinds.Note(text=text))
            problem = self._save(run, last)
            error = run.stop.error or problem
            if error is None:
                run.events.write(kinds.WorkerStopped(step=last.step, reason=reason))
                code = 0
            else:
                failed = run.phase, run.phase_step, run.heartbeat.stage
                code = record_failure(run.events, error, *failed)
            _depart(notes)
        except BaseException as error:
            failed = Phase.LEAVING, last.step + 1, run.heartbeat.stage
            code = record_failure(run.events, error, *failed)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _save(self, run: Run, last: LastStep) -> Exception | None:
        """Write what is not saved yet, and wait for the save in progress."""
        run.at(Phase.CHECKPOINT)
        on_side_stream: Any = contextlib.nullcontext()
        if run.device.type == "cuda":  # the default stream is busy with the step
            on_side_stream = torch.cuda.stream(torch.cuda.Stream(run.device))
        if last.state is not None:
            with on_side_stream:
                run.saver.begin(last.state, background=False)
        problem = run.saver.wait()
        if problem is None or not run.plan.checkpoint.enabled:
            return None
        return checkpoint.unsaved(run, last.step, problem)


def unsaved_state(run: Run) -> State | None:
    """Return the content of a checkpoint of the steps so far; None where none is needed.

    Tensors that a forward may change (buffers) are copied. All ranks must call.
    """
    if not run.plan.checkpoint.enabled or run.step == 0 or run.saver.saved_step == run.step:
        return None
    state = checkpoint.state_of(run)
    return replace(
        state,
        pieces=[
            p if p.lasts else replace(p, local=p.local.clone(), is_copy=True) for p in state.pieces
        ],
    )


def share_of_micro_batch(
    forward: float, forwards: float, *, recomputes: bool, forward_only: bool
) -> float:
    """Return the fraction of a micro-batch that is done.

    `forward` is the fraction of its forward that is done. Once that is 1, `forwards` is the time
    since the micro-batch began, divided by the forward's time. Backward takes twice the forward's
    time, and three times where it recomputes blocks.
    """
    if forward_only:
        return min(forward, ALMOST)
    whole = 4 if recomputes else 3
    return min((forward if forward < 1 else max(forwards, 1.0)) / whole, ALMOST)


def _name(last: LastStep) -> str:
    return f"step {last.step + 1}" if last.what == "step" else f"the {last.what}"


def _becomes(run: Run, last: LastStep) -> str:
    """Return a message on what is saved, and where `colotrain resume` continues."""
    if not run.plan.checkpoint.enabled:
        return "nothing is saved (checkpoint.every=0)"
    if last.state is not None:
        return f"saving step {last.step}"
    if last.step:
        return f"step {last.step} is saved already"
    return "no step is finished, so there is nothing to save: a resumed run begins with step 1"


def _depart(notes: Notes) -> None:
    """Wait until all ranks have saved: one that is gone fails the others' collectives.

    Rank 0 waits for each rank, and the others for its word alone. Its process may host the store.
    """
    is_over = AwakeTimeout(LEAVE_TOGETHER_S).is_over
    with contextlib.suppress(Exception):  # the store is gone: rank 0 has seen all ranks
        if (rank := dist.get_rank()) == 0:
            for other in range(1, dist.get_world_size()):
                notes.wait(f"{DEPARTED}/{other}", is_over=is_over)
            notes.write(DEPARTED, "")
        else:
            notes.write(f"{DEPARTED}/{rank}", "")
            notes.wait(DEPARTED, is_over=is_over)
