"""The training loop: fetch and accumulate, agree, update, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from colotrain.engine.comms.waiting import waiting
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.accumulation import accumulate
from colotrain.engine.sharding.sums import average_statistics_
from colotrain.engine.state import checkpoint
from colotrain.engine.state.checkpoint import copy_to_memory, finish_copy
from colotrain.engine.state.run_state import Run
from colotrain.engine.step import monitor
from colotrain.engine.step.batches import Batches
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.evaluation import is_over, why_over
from colotrain.engine.step.participant import Agreed, Participant, StepResult, answers_of
from colotrain.engine.step.participants import ORDER
from colotrain.engine.step.rollback import freeze_as_of, skip_
from colotrain.engine.step.targets import find_targets
from colotrain.events.kinds import Note, WorkerFinished, WorkerStopped
from colotrain.models.objective import is_of_whole
from colotrain.spec.phases import Phase


def train(run: Run, *others: Callable[[Run, StepClock], Participant]) -> str:
    """Train until the plan's last step, or until a rank is asked to stop. All ranks must call.

    `others` make participants beside those that every run has. Returns "finished" or "stopped"; the
    state is saved in both cases.
    """
    if run.stop.reason is not None:  # while the run was prepared
        return save_and_stop(run)
    clock = StepClock(run.device)
    participants = [make(run, clock) for make in (*ORDER, *others)]
    find_targets(run)
    result = None
    while True:
        for participant in participants:
            participant.after_step(result)
        if result is not None and result.stops:
            return save_and_stop(run)
        if is_over(run):
            return finish(run)
        result = take_step(run, participants, clock)


def take_step(run: Run, participants: Sequence[Participant], clock: StepClock) -> StepResult | None:
    """Make the next step; returns None where it was not finite and the run was rolled back."""
    clock.begin_step()
    begin_step_(run)
    batches, num = Batches(run, clock), run.plan.batch.accumulation_steps
    with monitor.interruptible(run):
        for participant in participants:
            participant.before_forward(batches)
        accumulate(run.gradients, batches, num=num, totals=batches.totals)
        clock.lap("compute_s", less=clock.data_s)
        agreed = agree(run, batches, participants, clock)
    clock.lap("reduce_s")
    run.at(Phase.OPTIMIZER)
    for participant in participants:
        participant.before_update(agreed)
    lr = update_(run) if agreed.finite else None
    if lr is None and not skip_(run, agreed):
        return None
    average_statistics_(run.sharded)
    run.step += 1
    stops = agreed["stop"] and run.step < run.plan.train.max_steps
    return StepResult(agreed=agreed, lr=lr, stops=stops)


def begin_step_(run: Run) -> None:
    """Unfreeze what is due, and drop the gradients of the last step."""
    run.sharded.calls.clear()
    if run.tiers is not None:
        run.tiers.begin_step()
    if run.step in run.plan.freeze.unfreeze and run.step > 0:
        freeze_as_of(run, run.step)
    gradients.clear_(run.sharded.module)


def agree(
    run: Run, batches: Batches, participants: Sequence[Participant], clock: StepClock
) -> Agreed:
    """Run the one small all-reduce of a step: loss, targets, gradient norms, and what is asked."""
    asks = dict(ask for participant in participants for ask in participant.asks().items())
    run.at(Phase.REDUCE)
    run.progress.begin_agreement()
    terms = torch.tensor([t for ask in asks.values() for t in ask.terms()], dtype=torch.float64)
    squares, used = gradients.local_statistics(run.gradients, run.device)
    known_here = gradients.to_device(torch.cat((terms, used)), run.device)
    counts = run.counts(whole=is_of_whole(run.sharded.module))
    own = batches.totals.sums().to(run.device)
    own = own if counts else torch.zeros_like(own)  # not times 0: a sum may be infinite
    sizes = len(own), len(terms), 2 * len(used)
    shared = torch.cat((own, known_here[: sizes[1]], squares, known_here[sizes[1] :]))
    with waiting():
        dist.all_reduce(shared)
    clock.mark("reduced")
    sums, answered, statistics = shared.cpu().split(sizes)  # the only wait for the device in a step
    loss_sum, tokens, odd = sums.tolist()
    factor = batches.totals.gradient_factor(tokens)
    gradients.store_statistics_(run.gradients, statistics, factor=factor)
    return Agreed(
        loss=loss_sum / (tokens or 1.0),
        tokens=tokens,
        odd=odd,
        grad_norm=run.gradients.norm,
        answers=answers_of(asks, answered.tolist(), dist.get_world_size()),
        batches=batches,
    )


def update_(run: Run) -> float:
    """Clip and step the optimizer once; returns its learning rate."""
    state = run.gradients
    run.loss_scale.update(overflow=False)
    state.clip_ratio = gradients.clip_ratio(state.norm, run.plan.train.grad_clip)
    lr = run.optimizer.step(factor=state.factor * state.clip_ratio)
    checkpoint.try_saving(run)
    if not run.optimizer.streams:
        state.factor = 1.0 / state.clip_ratio  # the stored gradients are clipped now
    return lr


def save_and_stop(run: Run) -> str:
    """Save, and record why the ranks stop. Raises the error because of which they do, if any."""
    checkpoint.save(run)
    checkpoint.finish_saving(run)
    if run.copies is not None and not run.plan.checkpoint.enabled:
        run.copies.every = 1  # nothing else keeps the steps since the last copy
        copy_to_memory(run)
    finish_copy(run)
    if run.stop.error is not None:
        raise run.stop.error
    run.events.write(WorkerStopped(step=run.step, reason=run.stop.reason or "another rank"))
    return "stopped"


def finish(run: Run) -> str:
    """Save the last step, and record that the run is over."""
    finish_copy(run)
    checkpoint.save(run)
    checkpoint.finish_saving(run)
    early = why_over(run)
    if early is not None and run.rank == 0:
        run.events.write(Note(step=run.step, text=f"step {run.step}: {early}"))
    run.events.write(WorkerFinished(step=run.step, reason=early))
    return "finished"
