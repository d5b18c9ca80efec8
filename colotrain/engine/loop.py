"""The training loop: fetch, forward and backward, gradients, step, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from colotrain.engine import generators, guard, monitor
from colotrain.engine.accumulation import Batch, StepTotals, accumulate, to_device
from colotrain.engine.checkpoint import checkpoint
from colotrain.engine.checkpoint.memory_state import copy_to_memory, finish_copy
from colotrain.engine.early_stopping import why_over
from colotrain.engine.evaluation import evaluate
from colotrain.engine.gradients import gradients, noise
from colotrain.engine.gradients.nonfinite import describe, locate
from colotrain.engine.gradients.statistics import Recorder
from colotrain.engine.lap_times import Clock, DeviceClock
from colotrain.engine.profiling import Profiler
from colotrain.engine.recording import record_gradients, record_step
from colotrain.engine.rollback import freeze_as_of, roll_back_
from colotrain.engine.run_state import Run, StepResult
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.sharding.sums import average_statistics_
from colotrain.engine.targets import find_targets
from colotrain.engine.text_samples import write_samples
from colotrain.engine.unchanged import kept_buffers
from colotrain.engine.waiting import waited_s, waiting
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Nonfinite, Note, WorkerFinished, WorkerStopped
from colotrain.rundir import NOISE
from colotrain.spec.batch import is_due
from colotrain.spec.plan import READ_BACK, RunPlan

PATIENCE_FACTOR = 5.0
"""Factor on the expected time between two heartbeats, after which a rank counts as silent."""


def train(run: Run) -> str:
    """Train until the plan's last step, or until a rank is asked to stop. All ranks must call.

    Returns "finished" or "stopped"; the state is saved in both cases.
    """
    plan = run.plan
    if run.stop_reason is not None:  # while the run was prepared
        _save_and_stop(run)
        return "stopped"
    find_targets(run)
    leaves_early = plan.smoke and run.step == 0
    if (run.step == 0 and plan.train.eval_first) or was_left_before_evaluation(run):
        evaluate(run)
        write_samples(run)
    if plan.train.on_nonfinite == "rollback":
        checkpoint.save(run)  # so that the run always has a checkpoint of its own to roll back to
    if run.copies is not None and run.copies.resumed and _is_checkpoint_due(run):
        checkpoint.save(run)  # the attempt before ended in it
    gpu, profiler = DeviceClock(run.device), Profiler(run)
    while run.step < plan.train.max_steps and why_over(run) is None:
        profiler.begin_step()
        clock, waited_before_s = Clock(), waited_s()
        gpu.begin_step()
        _begin_step(run)
        batches, num = Fetch(run, gpu), plan.batch.accumulation_steps
        with monitor.interruptible(run):
            totals = accumulate(run.gradients, batches, num=num, totals=new_totals(run))
            clock.lap("compute_s", less=batches.seconds)
            gpu.mark("computed")
            finish_copy(run)
            result = agree(run, totals, gpu)
        clock.lap("reduce_s")
        tell_of_count(run, result)
        if result.update_placement:
            update_placement_(run)
        noise_columns = measure_noise(run) if result.noise and result.finite else None
        if noise_columns is not None:
            clock.leave_out()
            gpu.mark("resumed")
        recorder = Recorder(state=run.gradients, optimizer=run.optimizer)
        if result.record:
            recorder.begin()
        skipped, lr = update_(run, result, recorder if result.record else None)
        average_statistics_(run.sharded)
        if run.must_roll_back:
            roll_back_(run)
            continue
        if result.record:
            record_gradients(run, recorder, noise=noise_columns)
        clock.lap("optimizer_s")
        gpu.mark("updated")
        run.step += 1
        run.heartbeat.patience_s = patience_s(plan, clock.laps)  # only a first step is slow
        copy_to_memory(run)
        clock.lap("copy_s")
        times = {"step_s": clock.total(), "data_s": batches.seconds, **clock.laps, **gpu.seconds()}
        if run.waits_counted:
            times["wait_s"] = waited_s() - waited_before_s
        record_step(run, result, times=times, lr=lr, skipped=skipped)
        if is_due(run.step, plan.elastic.check_every):
            run.at("search for corruption")
            guard.after_update(run)
        if leaves_early:
            run.stop_reason = run.stop_reason or READ_BACK
        if (result.stop or leaves_early) and run.step < plan.train.max_steps:
            profiler.close()
            _save_and_stop(run)
            return "stopped"
        if is_due(run.step, plan.train.eval_every) or run.step == plan.train.max_steps:
            finish_copy(run)
            evaluate(run)
            write_samples(run)
            copy_to_memory(run, again=True)
        if result.save or _is_checkpoint_due(run):
            checkpoint.save(run)
        profiler.end_step(asked=result.profile)
    profiler.close()
    finish_copy(run)
    checkpoint.save(run)
    checkpoint.finish_saving(run)
    early = why_over(run)
    if early is not None and run.rank == 0:
        run.events.write(Note(step=run.step, text=f"step {run.step}: {early}"))
    run.events.write(WorkerFinished(step=run.step, reason=early))
    return "finished"


def tell_of_count(run: Run, result: StepResult) -> None:
    """Say in the first step that it has no targets, or what may be taken for their number."""
    if run.rank == 0 and run.step == 0 and not result.tokens:
        text = "step 1 has no target (every label is -100): nothing is learned from its samples"
        run.events.write(Note(step=1, text=f"warning: {text}"))
    elif run.rank == 0 and result.odd:
        text = (
            f"step 1 has {result.tokens:.4g} targets: of two values of a forward "
            "or loss the second is their number or summed weight; a metric belongs in a dict, "
            'as {"loss": loss, "accuracy": value}'
        )
        run.events.write(Note(step=1, text=text))


def _begin_step(run: Run) -> None:
    """Note the random state, unfreeze what is due, and drop the last step's gradients."""
    run.generators = generators.states(run.device)
    run.sharded.calls.clear()
    if run.tiers is not None:
        run.tiers.begin_step()
    unfreeze_(run)
    gradients.clear_(run.sharded.module)


def _save_and_stop(run: Run) -> None:
    """Save, and record why the ranks stop. Raises the error because of which they do, if any."""
    checkpoint.save(run)
    checkpoint.finish_saving(run)
    if run.copies is not None and not run.plan.checkpoint.enabled:
        run.copies.every = 1  # nothing else keeps the steps since the last copy
        copy_to_memory(run)
    finish_copy(run)
    if run.stop_error is not None:
        raise run.stop_error
    run.events.write(WorkerStopped(step=run.step, reason=run.stop_reason or "another rank"))


def _is_checkpoint_due(run: Run) -> bool:
    is_best = run.best is not None and run.best[0] == run.step
    return is_best or is_due(run.step, run.plan.checkpoint.every)


def was_left_before_evaluation(run: Run) -> bool:
    """Whether the run was stopped after a step, before the evaluation that follows the step."""
    due = is_due(run.step, run.plan.train.eval_every)
    return run.step > 0 and due and run.evaluations.last_step not in (None, run.step)


def patience_s(plan: RunPlan, laps: dict[str, float]) -> float:
    """Return the seconds for which a rank may be silent: a micro-batch may take long.

    `laps` are the host's: on a GPU the host is silent while it waits for all that it has queued.
    """
    micro_batch_s = laps["compute_s"] / plan.batch.accumulation_steps
    longest = max(micro_batch_s, laps["reduce_s"], laps["optimizer_s"])
    return max(plan.elastic.hang_timeout_s, PATIENCE_FACTOR * longest)


class Fetch:
    """The micro-batches of one step on the device, with the time that fetching them took."""

    def __init__(self, run: Run, gpu: DeviceClock | None = None) -> None:
        self.run, self.gpu, self.seconds = run, gpu, 0.0

    def __iter__(self) -> Iterator[Batch]:
        run = self.run
        for index in range(run.plan.batch.accumulation_steps):
            run.at("data")
            started = time.perf_counter()
            with self.gpu.fetching() if self.gpu is not None else nullcontext():
                batch = to_device(run.train_data.micro_batch(run.batch_index, index), run.device)
            self.seconds += time.perf_counter() - started
            run.at("forward or backward")
            run.progress.at_micro_batch(
                index, of=run.plan.batch.accumulation_steps, calls=len(run.sharded.calls)
            )
            run.micro_batches += 1
            yield batch


def new_totals(run: Run) -> StepTotals:
    nothing = torch.zeros(3, dtype=torch.float64, device=run.device)
    return StepTotals(
        nominal=run.nominal_targets,
        loss_scale=run.loss_scale.scale,
        loss_sum=nothing[0],
        count=nothing[1],
        odd=nothing[2],
        asks_odd=run.step == 0,
    )


def agree(run: Run, totals: StepTotals, gpu: DeviceClock) -> StepResult:
    """Run the one small all-reduce of a step: loss, targets, gradient norm, requests to stop."""
    run.at("reduce")
    run.progress.begin_agreement()
    run.stop_reason = run.reason_to_stop()
    asked = run.rundir.grads_request() if run.rank == 0 else None
    order, stage = run.sharded.order_of_calls(), run.sharded.stage
    orders = torch.zeros(2, stage.count, dtype=torch.float64)
    orders[:, stage.index] = torch.tensor([order, order * order])
    traced = run.rank == 0 and run.rundir.profile_request() is not None
    short, due = run.tiers is not None and run.tiers.policy.exceeds_budget(), run.saver.is_due()
    flags = [run.stop_reason is not None, asked is not None, asked == NOISE, short, due, traced]
    copy_s = run.copies.seconds if run.copies is not None else 0.0
    # a GPU has not done yet what the host has queued: of it, the step before is known
    took_s = run.progress.elapsed_s() if gpu.step_s is None else gpu.step_s
    asks = torch.tensor([*flags, took_s, copy_s], dtype=torch.float64)
    requests = torch.cat((asks, orders.view(-1)))
    if run.tiers is not None:
        run.tiers.transfers.order_gradients()
    norms, used = gradients.local_statistics(run.gradients, run.device)
    known_here = gradients.to_device(torch.cat((requests, used)), run.device)
    mine = torch.stack((totals.loss_sum, totals.count, totals.odd)).to(run.device)
    mine = mine * run.sharded.parts.is_first  # the others of its group have the same loss
    shared = torch.cat((mine, known_here[: len(requests)], norms, known_here[len(requests) :]))
    with waiting():
        dist.all_reduce(shared)
    gpu.mark("reduced")
    shared = shared.cpu()  # the only wait for the device in a step
    num_sums = len(mine) + len(asks)
    sums, world = shared[:num_sums].tolist(), dist.get_world_size()
    loss_sum, count, odd, stop, record, noisy, update_placement, save, traced, took_s, copy_s = sums
    monitor.note_duration(run, took_s / world)
    if run.copies is not None:
        run.copies.note_durations(took_s / world, copy_s / world)
    known = num_sums + orders.numel()
    totals_of, squares_of = shared[num_sums:known].view(2, -1)
    if not torch.equal(totals_of**2, squares_of * (world // stage.count)):  # some order is another
        raise ColotrainError(
            f"step {run.step + 1}: ranks ran different blocks, or in another order",
            "let every rank call every block in every forward",
        )
    factor = totals.gradient_factor(count)
    gradients.store_statistics_(run.gradients, shared[known:], factor=factor)
    return StepResult(
        loss=loss_sum / (count or 1.0),
        tokens=count,
        odd=odd,
        grad_norm=run.gradients.norm,
        stop=stop > 0,
        record=record > 0 or is_due(run.step + 1, run.plan.observe.grads_every),
        noise=noisy > 0,
        save=save > 0,
        update_placement=update_placement > 0,
        profile=traced > 0,
        totals=totals,
    )


def update_placement_(run: Run) -> None:
    """Place groups in tiers anew, from the memory used so far. All ranks must call.

    If the new placement fails (a full disk), the steps done so far are saved before the run ends.
    """
    assert run.tiers is not None
    run.phase = "placement"
    first = not run.tiers.policy.measured
    run.saver.before_update()  # the save may read from tensors that move
    try:
        changed = run.tiers.update_placement(run.optimizer)
    except ColotrainError:
        if run.step:
            checkpoint.save(run)
            checkpoint.finish_saving(run)
        raise
    if run.rank != 0:
        return
    if changed or first:
        run.events.write(run.tiers.policy.describe(run.step))
    if run.tiers.policy.cannot_offload_more:
        text = "plugin.budget is exceeded, and nothing is left that could go to a lower tier"
        run.events.write(Note(text=f"step {run.step + 1}: {text}"))


def update_(run: Run, result: StepResult, recorder: Recorder | None = None) -> tuple[bool, float]:
    """Clip and step the optimizer once; returns whether the step was skipped, and its rate.

    A step that is not finite is skipped on every rank if fp16 or the plan says so. Otherwise it
    ends the run before it can harm the weights.
    """
    run.at("optimizer")
    state = run.gradients
    if not result.finite:
        if not run.loss_scale.can_fall:
            handle_nonfinite(run, result)
        run.loss_scale.update(overflow=True)
        return True, 0.0
    run.loss_scale.update(overflow=False)
    run.saver.before_update()
    guard.before_update(run)
    if run.on_gradients is not None:
        run.on_gradients(run.sharded.module, run.step)
        reshard(run.sharded)  # it may have changed what is frozen
    state.clip_ratio = gradients.clip_ratio(result.grad_norm, run.plan.train.grad_clip)
    stored = state.factor * state.clip_ratio
    lr = run.optimizer.step(factor=stored, watch=recorder)
    checkpoint.try_saving(run)
    if not run.optimizer.streams:
        state.factor = 1.0 / state.clip_ratio  # the stored gradients are clipped now
    return False, lr


def handle_nonfinite(run: Run, result: StepResult) -> None:
    """Find where a loss or gradient stopped being finite; end the run unless the plan skips it."""
    micro_batches = range(run.plan.batch.accumulation_steps)
    ids = [run.train_data.ids(run.batch_index, index) for index in micro_batches]
    with again(run, phase="search for the first value that is not finite") as batches:
        origin = locate(run.gradients, batches, ids, step=run.step + 1, nominal=run.nominal_targets)
    gradients.clear_(run.sharded.module)
    where = f"it began in {describe(origin)}" if origin else "a second pass was clean"
    problem = f"step {run.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}; {where}"
    if run.rank == 0:
        run.events.write(origin or Nonfinite(step=run.step + 1))
        run.events.write(Note(text=problem))
    run.must_roll_back = run.plan.train.on_nonfinite == "rollback"
    if run.plan.train.on_nonfinite == "stop":
        fix = "lower optim.lr, or set train.on_nonfinite=skip or rollback"
        if origin is not None and origin.input is not None:
            fix = "correct or leave out these samples, or set train.on_nonfinite=skip"
            raise ColotrainError(problem, fix)
        if run.loss_scale.dynamic and not math.isfinite(result.loss):
            fix = f"let the model compute its loss in float32 (logits.float()), {fix}"
        raise ColotrainError(problem, fix)


def measure_noise(run: Run) -> dict[str, Any]:
    """Return the noise between this step's micro-batches, as a `Gradients` event has it."""
    batch = run.plan.batch
    with again(run, phase="gradient noise") as batches:
        return noise.measure(
            run.gradients,
            batches,
            num=batch.accumulation_steps,
            totals=new_totals(run),
            samples=batch.micro_batch,
        )


@contextmanager
def again(run: Run, *, phase: str) -> Iterator[Fetch]:
    """Yield the micro-batches of this step again, with the same weights and random numbers."""
    before, done = run.phase, run.micro_batches
    run.at(phase)
    if run.generators is not None:
        generators.set_states(run.device, run.generators)
    gradients.clear_(run.sharded.module)
    with torch.no_grad(), kept_buffers(run.sharded.module), torch.enable_grad():
        yield Fetch(run)
    if run.tiers is not None:
        run.tiers.transfers.wait_for_gradients()
    gradients.drop_unused_(run.gradients)
    run.micro_batches = done  # the second pass is not training
    run.at(before)


def unfreeze_(run: Run) -> None:
    """Begin to train the parameters that the schedule unfreezes in this step."""
    if run.step in run.plan.freeze.unfreeze and run.step > 0:
        freeze_as_of(run, run.step)
