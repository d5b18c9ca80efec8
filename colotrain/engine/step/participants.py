"""What takes part in the steps of a run, beside the step itself, in its order.

Participants whose state is more than a line or two have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from colotrain.dotted import import_target
from colotrain.engine.comms import exchange
from colotrain.engine.comms.raw_bytes import checksum
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state import checkpoint
from colotrain.engine.state.checkpoint import copy_to_memory, finish_copy
from colotrain.engine.state.pieces import persistent_buffers
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.adapter_gradients import AdapterGradients
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.evaluation import Evaluator
from colotrain.engine.step.global_rows import GlobalPass
from colotrain.engine.step.guard import Guard
from colotrain.engine.step.monitor import StepDurations
from colotrain.engine.step.participant import (
    Agreed,
    Any_,
    Ask,
    Mean,
    Participant,
    Same,
    StepResult,
)
from colotrain.engine.step.profiling import Profiler
from colotrain.engine.step.recording import GradientRecords, StepRecords
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.spec.axes import STAGE
from colotrain.spec.batch import is_due
from colotrain.spec.phases import Phase
from colotrain.spec.plan import READ_BACK


class StopRequests(Participant):
    """Tells all ranks that one is asked to stop; a smoke run stops after its first step."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.leaves_early = run.plan.smoke and run.step == 0

    def asks(self) -> Mapping[str, Ask]:
        run = self.run
        run.stop.reason = run.stop.wanted() or (READ_BACK if self.leaves_early else None)
        return {"stop": Any_(run.stop.reason is not None)}


class SameBlocks(Participant):
    """Refuses a step in which ranks ran different blocks, or in another order."""

    def asks(self) -> Mapping[str, Ask]:
        sharded = self.run.sharded
        order, stage = sharded.order_of_calls(), sharded.stage
        ranks = sharded.comms.ranks.size(*STAGE)
        return {"same_blocks": Same(order, stage.index, stage.count, ranks)}

    def before_update(self, agreed: Agreed) -> None:
        if not agreed["same_blocks"]:
            raise ColotrainError(
                f"step {self.run.step + 1}: ranks ran different blocks, or in another order",
                "let every rank call every block in every forward",
            )


class FirstStepNotes(Participant):
    """Says of the first step that it has no targets, or what may be taken for their number."""

    def before_update(self, agreed: Agreed) -> None:
        run = self.run
        if run.rank == 0 and run.step == 0 and not agreed.tokens:
            text = "step 1 has no target (every label is -100): nothing is learned from its samples"
            run.events.write(Note(step=1, text=f"warning: {text}"))
        elif run.rank == 0 and agreed.odd:
            text = (
                f"step 1 has {agreed.tokens:.4g} targets: of two values of a forward "
                "or loss the second is their number or summed weight; a metric belongs in a dict, "
                'as {"loss": loss, "accuracy": value}'
            )
            run.events.write(Note(step=1, text=text))


class BufferDifferences(Participant):
    """Says once which buffers differ between ranks, because a forward changed them by its samples.

    Ranks compare them after the steps 1, 2, 4, 8 ... of an attempt: a buffer may move later only.
    """

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.num_steps, self.found = 0, False

    def after_step(self, result: StepResult | None) -> None:
        run = self.run
        self.num_steps += result is not None
        is_due = result is not None and self.num_steps.bit_count() == 1
        if self.found or not is_due or run.plan.world_size == 1:
            return
        run.at(Phase.BUFFERS)
        names = differing_buffers(run.sharded.module)
        self.found = bool(names)
        if names and run.rank == 0:
            run.events.write(Note(step=run.step, text=_buffer_warning(names, run)))


def differing_buffers(model: nn.Module) -> list[str]:
    """Return the persistent buffers that differ from rank 0's on any rank. All ranks must call."""
    sums = {name: checksum(buffer) for name, buffer in persistent_buffers(model)}
    of_first = exchange.broadcast(sums)
    own = [name for name, value in sums.items() if of_first.get(name, value) != value]
    return list(dict.fromkeys(name for names in exchange.all_gather(own) for name in names))


def _buffer_warning(names: list[str], run: Run) -> str:
    shown = ", ".join(names[:3]) + (f" ({len(names)} in all)" if len(names) > 3 else "")
    evaluated = "" if run.plan.mesh.together > 1 else "evaluations and "
    return (
        f"warning: step {run.step}: buffers that forward changes differ between ranks: {shown}. "
        f"Each rank trains with its own, and {evaluated}exports have rank 0's: results depend on "
        "the number of ranks. Average in forward what they are made of "
        "(torch.distributed.all_reduce), or train with one rank"
    )


class Placement(Participant):
    """Places groups in tiers anew, from the memory used so far, where a rank is short of memory."""

    def asks(self) -> Mapping[str, Ask]:
        tiers = self.run.tiers
        if tiers is None:
            return {}
        short = tiers.policy.exceeds_budget()  # also after the first step, which is measured
        tiers.transfers.order_gradients()  # whose norms are summed next
        return {"short_of_memory": Any_(short)}

    def before_update(self, agreed: Agreed) -> None:
        """If the new placement fails (a full disk), the steps done so far are saved first."""
        run, tiers = self.run, self.run.tiers
        if tiers is None or not agreed["short_of_memory"]:
            return
        before, run.phase = run.phase, Phase.PLACEMENT
        policy, tells = tiers.policy, run.plan.ranks.is_first(run.rank, *STAGE)
        first, was_at_end = not policy.measured, policy.cannot_offload_more
        run.saver.before_update()  # the save may read from tensors that move
        try:
            changed = tiers.update_placement(run.optimizer)
        except ColotrainError:
            if run.step:
                checkpoint.save(run)
                checkpoint.finish_saving(run)
            raise
        run.phase = before
        if tells and (changed or first):
            run.events.write(policy.describe(run.step))
        if tells and policy.cannot_offload_more and not was_at_end:
            text = "plugin.budget is exceeded, and nothing is left that could go to a lower tier"
            run.events.write(Note(text=f"step {run.step + 1}: {text}"))


class MemoryCopying(Participant):
    """Copies the state after a step to the launcher's memory."""

    def asks(self) -> Mapping[str, Ask]:
        finish_copy(self.run)  # only once the ranks have met may one of them begin the next copy
        copies = self.run.copies
        return {"copy_s": Mean(copies.seconds if copies is not None else 0.0)}

    def before_update(self, agreed: Agreed) -> None:
        if self.run.copies is not None:
            self.run.copies.note_durations(agreed["step_s"], agreed["copy_s"])

    def after_step(self, result: StepResult | None) -> None:
        if result is not None:
            copy_to_memory(self.run)
            self.clock.lap("copy_s")


class Saving(Participant):
    """Writes checkpoints when they are due."""

    def asks(self) -> Mapping[str, Ask]:
        return {"save": Any_(self.run.saver.is_due_by_time())}

    def before_update(self, agreed: Agreed) -> None:
        if agreed.finite:
            self.run.saver.before_update()

    def after_step(self, result: StepResult | None) -> None:
        if self._saves_after(result):
            checkpoint.save(self.run)

    def _saves_after(self, result: StepResult | None) -> bool:
        run = self.run
        is_best = run.history.best is not None and run.history.best[0] == run.step
        due = is_best or is_due(run.step, run.plan.checkpoint.every)
        if result is not None:  # a run that stops is saved in any case
            return not result.stops and (result.agreed["save"] or due)
        # the previous attempt may have ended while this checkpoint was due
        resumed_when_due = run.copies is not None and run.copies.resumed and due
        # a run that may roll back always has a checkpoint of its own
        return resumed_when_due or run.plan.train.on_nonfinite == "rollback"


class OnGradients(Participant):
    """Calls a function with the model when its gradients can be read: `train.on_gradients`."""

    def __init__(
        self, run: Run, clock: StepClock, *, function: Callable[[nn.Module, int], Any] | None = None
    ) -> None:
        super().__init__(run, clock)
        self.function = function
        if dotted := run.plan.train.on_gradients:
            self.function = import_target("train.on_gradients", dotted)

    def before_update(self, agreed: Agreed) -> None:
        if agreed.finite and self.function is not None:
            self.function(self.run.sharded.module, self.run.step)
            reshard(self.run.sharded)  # it may have changed what is frozen


ORDER: tuple[Callable[[Run, StepClock], Participant], ...] = (
    # What an answer decides for all others comes first.
    StopRequests,
    SameBlocks,
    FirstStepNotes,
    AdapterGradients,
    # What the losses of a step need to know of one another.
    GlobalPass,
    # Placement measures the memory of the step's own passes, before noise makes a second one.
    Placement,
    # Noise comes before statistics begin: afterwards gradients are those of the step again.
    # A record is part of the update's time.
    GradientRecords,
    # It reads the times of compute, reduction and update, which are complete now.
    StepDurations,
    # A copy has its own time, and a step is recorded once that is known.
    MemoryCopying,
    # A step is recorded before anything can fail that is no part of it.
    StepRecords,
    # What differs is told before it is evaluated or saved.
    BufferDifferences,
    # Corrupt values are found before they are evaluated or saved.
    Guard,
    # A checkpoint holds the evaluation of its step, which decides whether it is the best one.
    Evaluator,
    Saving,
    # Users' code may change parameters, once they are compared and what is to be saved is kept.
    OnGradients,
    # A traced step contains all that the others do.
    Profiler,
)
"""What takes part in the steps of every run, in the one order of all four moments."""
