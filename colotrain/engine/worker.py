"""A worker process, from its entry to the training loop.

It reads the run's plan and torchrun's variables, and from its launcher where copies of the state
lie in memory and the key of the round; nothing else.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.prepare.identity import files_in_place
from colotrain.data.prepare.tokens import prepare_all
from colotrain.data.read.loader import BatchLoader
from colotrain.data.read.samples import StreamSamples, notes_of
from colotrain.engine.allocator import configure_malloc_for_build, configure_malloc_for_steps
from colotrain.engine.build.transforms import Build, transform_
from colotrain.engine.comms.agreement import check_alike
from colotrain.engine.comms.groups import Groups
from colotrain.engine.comms.process import StopRequest, agree_on_attempt, connect, start_patience
from colotrain.engine.gradients import gradients
from colotrain.engine.model.block_calls import NUM_FORWARDS
from colotrain.engine.model.precision import LossScale
from colotrain.engine.model.probes import own_log
from colotrain.engine.offload import page_locked
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.engine.state.choosing import StartingPoint
from colotrain.engine.state.run_state import Run, Stop, Targets
from colotrain.engine.state.saving import Saver
from colotrain.engine.state.sources import sources_of
from colotrain.engine.step import monitor
from colotrain.engine.step.inputs import first_micro_batch, import_targets, open_loaders
from colotrain.engine.step.precompute import precompute
from colotrain.engine.step.recording import record_failure, record_peak_flops
from colotrain.engine.step.statistics import describe_parameters
from colotrain.engine.step.targets import agree_on_targets, first_samples
from colotrain.engine.step.train import train
from colotrain.errors import ColotrainError
from colotrain.events.heartbeats import HeartbeatWriter
from colotrain.events.kinds import Note, WorkerStarted
from colotrain.events.log import EventWriter
from colotrain.generators import seed_all
from colotrain.lost_peers import peer_lost_in
from colotrain.models.facts import facts_of
from colotrain.models.loading import COMPILED, build
from colotrain.models.objective import attach_
from colotrain.rundir import RunDir
from colotrain.spec.axes import DP_REPLICATE, DP_SHARD, EP, PP
from colotrain.spec.phases import Phase
from colotrain.spec.plan import RunPlan
from colotrain.spec.resizing import resize


def main(path: str, digest: str) -> int:
    """Train the run in `path` as the rank that torchrun's variables name; returns the exit code.

    `digest` is that of the run's plan.
    """
    stop = StopRequest(rundir := RunDir(path))
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    plan = resize(rundir.plan(digest), nodes)
    rank = int(os.environ["RANK"])
    heartbeat = HeartbeatWriter(
        rundir.heartbeat_file(rank),
        inside=rundir.path,
        rank=rank,
        patience_s=start_patience(plan),
    )
    heartbeat.beat(0, Phase.START)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # sent by the launcher to a silent rank
    # where NCCL's flight recorder writes a rank's last collectives, when its watchdog ends it
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(rundir.collective_dumps))
    device = connect(plan)
    attempt = agree_on_attempt(rundir)
    events = EventWriter(rundir.event_file(rank=rank, attempt=attempt), inside=rundir.path)
    run = None
    try:
        if rank == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            record_peak_flops(events, plan.train.precision, device)
        run = prepare(plan, rundir, device=device, events=events, stop=stop, heartbeat=heartbeat)
        announce(run, attempt)
        monitor.start(run)
        train(run)
    except Exception as error:
        phase, step = (run.phase, run.phase_step) if run else (Phase.START, 0)
        heartbeat.beat(step, Phase.ENDING)  # the launcher ends ranks that compute in vain
        exit_code = record_failure(events, error, phase, step, heartbeat.stage)
        is_ours = isinstance(error, ColotrainError) and not peer_lost_in(error)
        if run is not None and is_ours:
            run.saver.linger()  # every rank raised it and can finish its save
        return exit_code
    dist.destroy_process_group()
    return 0


def prepare(
    plan: RunPlan,
    rundir: RunDir,
    *,
    device: torch.device,
    events: EventWriter,
    stop: Callable[[], str | None],
    heartbeat: HeartbeatWriter | None = None,
) -> Run:
    """Build what a run consists of, and read the state from which it goes on. All must call."""
    rank = dist.get_rank()
    page_locked.tell_once(lambda text: events.write(Note(text=f"warning: rank {rank}: {text}")))
    configure_malloc_for_build()
    start = StartingPoint.choose(plan, rundir, events)
    import_targets(plan)
    data = open_loaders(plan, rank, rundir)
    beat = partial((heartbeat or HeartbeatWriter()).beat, 0, Phase.START)
    building, targets = build_sharded(plan, rundir, start, data, events, beat=beat)
    run = assemble(building, data, targets, start, device, events, stop, heartbeat)
    precompute(run)
    copy = plan.ranks.index(rank, PP, DP_REPLICATE, DP_SHARD, EP)
    seed_all(plan.train.seed * 100_003 + copy)  # dropout differs where activations do
    start.restore_(run)
    if run.tiers is None and run.optimizer.begins_with_zeros:
        run.optimizer.prepare_state_()
    configure_malloc_for_steps()
    return run


def build_sharded(
    plan: RunPlan,
    rundir: RunDir,
    start: StartingPoint,
    data: tuple[BatchLoader, BatchLoader | None],
    events: EventWriter,
    *,
    beat: Callable[[], None],
) -> tuple[Build, tuple[float, dict[str, Tensor]]]:
    """Build the model and shard it; also returns a step's targets, and the samples that tell them.

    Where `start` has state, its values come later.
    """
    model = build_alike(plan, data, events)
    trial = first_micro_batch(data[0]) if dist.get_rank() == 0 else None
    targets = agree_on_targets(plan, model, trial, data[0], events)
    building = Build(
        plan=plan,
        rundir=rundir,
        comms=Groups(plan.ranks, plan.cluster.device),
        model=model,
        trial=trial,
        samples=partial(
            first_samples, plan, trial or {}, data[0], most=NUM_FORWARDS, enough=NUM_FORWARDS
        ),
        tell=lambda text: events.write(Note(text=text)),
        beat=beat,
        step=start.step,
        given=start.names_to_restore(plan),
    )
    transform_(building)
    return building, targets


def build_alike(
    plan: RunPlan, data: tuple[BatchLoader, BatchLoader | None], events: EventWriter
) -> nn.Module:
    """Build the model, the same on every rank, and say what is read otherwise than written."""
    train_data, validation_data = data
    model = build(plan.model, seed=plan.train.seed)
    attach_(model, plan.model)
    if dist.get_rank() == 0:
        size, evaluates = plan.batch.global_batch, bool(plan.train.eval_steps)
        told = [COMPILED] if facts_of(model).was_compiled else []
        told += notes_of(train_data.samples, plan.data, global_batch=size, evaluates=evaluates)
        for text in told:
            events.write(Note(text=text))
    loaders = {"train": train_data, "validation": validation_data}
    check_alike(model, loaders, seed=plan.train.seed)
    return model


def assemble(
    building: Build,
    data: tuple[BatchLoader, BatchLoader | None],
    targets: tuple[float, dict[str, Tensor]],
    start: StartingPoint,
    device: torch.device,
    events: EventWriter,
    stop: Callable[[], str | None],
    heartbeat: HeartbeatWriter | None,
) -> Run:
    """Return the run of a model that is built, with its optimizer."""
    plan, sharded, samples = building.plan, building.sharded, data[0].samples
    optimizer = ShardOptimizer(
        plan.optim,
        max_steps=plan.train.max_steps,
        tiers=building.tiers,
        undecayed=building.undecayed,
        aliases=building.aliases,
        seed=plan.train.seed,
        parts=sharded.parts,
        comms=sharded.comms,
    )
    optimizer.add(sharded.trained())
    rank = dist.get_rank()
    shards = [] if rank or plan.data.source == "target" else prepare_all(plan.data)
    run = Run(
        plan=plan,
        rundir=building.rundir,
        rank=rank,
        device=device,
        sharded=sharded,
        optimizer=optimizer,
        gradients=gradients.watch(sharded),
        targets=Targets(*targets),
        train_data=data[0],
        validation_data=data[1],
        events=events,
        loss_scale=LossScale.for_precision(plan.train.precision),
        stop=Stop(stop),
        saver=Saver.make(plan, building.rundir, events),
        copies=start.copies,
        heartbeat=heartbeat or HeartbeatWriter(),
    )
    run.saver.sources = {} if rank else sources_of(plan, shards, num_samples=len(samples))
    run.saver.files_in_place = files_in_place(shards)
    if sharded.stage.count > 1:
        run.heartbeat.stage = sharded.stage.index
    run.saver.beat = lambda: run.at(run.phase)
    if isinstance(samples, StreamSamples):
        samples.beat = run.saver.beat
        samples.ended = partial(tell_end, run) if rank == 0 else samples.ended
    return run


def tell_end(run: Run, num_samples: int) -> None:
    """Say that the stream of `data.target` has ended."""
    text = f"the stream of data.target ended after {num_samples} samples: it begins again"
    run.events.write(Note(step=run.step + 1, text=text))


def announce(run: Run, attempt: int) -> None:
    stage = run.sharded.stage
    started = WorkerStarted(
        rank=run.rank,
        world_size=dist.get_world_size(),
        attempt=attempt,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=str(run.device),
        log=own_log(),
        step=run.step,
        stage=run.heartbeat.stage,
    )
    run.events.write(started)
    if run.rank == 0:
        run.events.write(describe_parameters(run.sharded.module, stage.holders))
        if run.tiers is not None:
            run.events.write(run.tiers.policy.describe(run.step))
