"""A worker process, from its entry to the training loop.

It reads the run's plan and torchrun's variables, and nothing else.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.read.samples import StreamSamples, notes_of
from colotrain.dotted import import_target
from colotrain.engine import exchange, monitor
from colotrain.engine.agreement import check_alike, check_filled_alike
from colotrain.engine.allocator import configure_malloc_for_build, configure_malloc_for_steps
from colotrain.engine.blocks import prepare_blocks_
from colotrain.engine.changed_inputs import CHANGES_INPUTS
from colotrain.engine.checkpoint import checkpoint, memory_state
from colotrain.engine.checkpoint.beside import BesideGradients
from colotrain.engine.checkpoint.choosing import choose_checkpoint, names_to_restore
from colotrain.engine.checkpoint.memory_copy import MemoryCopies
from colotrain.engine.checkpoint.saving import Saver
from colotrain.engine.checkpoint.sources import sources_of
from colotrain.engine.context_parallel import divide_among_ranks_
from colotrain.engine.freezing import freeze_
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.statistics import describe_parameters
from colotrain.engine.inputs import first_micro_batch, import_targets, open_loaders
from colotrain.engine.loop import train
from colotrain.engine.model_checks import check_dtypes
from colotrain.engine.offload import page_locked
from colotrain.engine.offload.group_bytes import estimate_non_model_bytes, measure_bytes
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.parameter_settings import norms_and_biases
from colotrain.engine.optim.shard_optimizer import ShardOptimizer, state_ratio
from colotrain.engine.pipeline.sequence import find_sequence
from colotrain.engine.pipeline.stage import Stage, keep_stage_
from colotrain.engine.precision import LossScale, cast_dtype
from colotrain.engine.probes import memory_now, own_log
from colotrain.engine.process import StopRequest, agree_on_attempt, connect, start_patience
from colotrain.engine.recording import lasting_bytes, record_failure, record_peak_flops
from colotrain.engine.references import add_references_
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.counted_waits import count_waits_
from colotrain.engine.sharding.fsdp_internals import HAS_SEVERAL_MODULES
from colotrain.engine.sharding.grouping import UNPACKED, find_groups, is_gathered
from colotrain.engine.sharding.sharded_model import (
    ShardedModel,
    make_mesh,
    materialise_,
    shard_,
    stays_gathered,
)
from colotrain.engine.shm.shared_parameters import SharedParameters, share_parameters
from colotrain.engine.shm.transport import install
from colotrain.engine.targets import agree_on_targets
from colotrain.engine.teacher import ask_teacher_
from colotrain.engine.tensor_parallel import TensorParts, divide_parameters_among_ranks_
from colotrain.errors import ColotrainError
from colotrain.events.heartbeats import HeartbeatWriter
from colotrain.events.kinds import Note, WorkerStarted
from colotrain.events.log import EventWriter
from colotrain.models.loading import COMPILED, WAS_COMPILED, begin_training_, build
from colotrain.models.objective import attach_
from colotrain.models.seeding import seed_all
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan
from colotrain.spec.resizing import resize
from colotrain.spec.sequence import BlockSequence

AHEAD_BYTES = 256 << 20
"""Bytes of whole parameters per core that a rank beside a GPU may draw ahead: a matrix of 8 B."""


def main(path: str) -> int:
    """Train the run in `path` as the rank that torchrun's variables name; returns the exit code."""
    stop = StopRequest(rundir := RunDir(path))
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    plan = resize(rundir.plan(), nodes)
    rank = int(os.environ["RANK"])
    heartbeat = HeartbeatWriter(
        rundir.heartbeat_file(rank),
        inside=rundir.path,
        rank=rank,
        patience_s=start_patience(plan),
    )
    heartbeat.beat(0, "start")
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
        if device.type == "cpu":
            run.baseline_bytes = max(0, memory_now()[0] - sum(lasting_bytes(run).values()))
        announce(run, attempt)
        monitor.start(run)
        train(run)
    except Exception as error:
        phase, step = (run.phase, run.phase_step) if run else ("start", 0)
        heartbeat.beat(step, "ending")  # the launcher ends ranks that compute in vain
        exit_code = record_failure(events, error, phase=phase, step=step)
        if run is not None and isinstance(error, ColotrainError):
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
    """Build the run: model on meta, freeze, shard, fill, optimizer, data, then the checkpoint."""
    rank, seed = dist.get_rank(), plan.train.seed
    page_locked.tell_once(lambda text: events.write(Note(text=f"warning: rank {rank}: {text}")))
    configure_malloc_for_build()
    copies = MemoryCopies.open(plan, events)
    copied = copies.choose() if copies is not None else None
    resumed = choose_checkpoint(plan, rundir, events, unless_before=copied.step if copied else 0)
    copied = copied if resumed is None else None
    import_targets(plan)
    train_data, validation_data = open_loaders(plan, rank, rundir)
    model = build(plan.model, seed=seed)
    attach_(model, plan.model)
    if rank == 0 and hasattr(model, WAS_COMPILED):
        events.write(Note(text=COMPILED))
    if rank == 0:
        size, evaluates = plan.batch.global_batch, bool(plan.train.eval_steps)
        told = notes_of(train_data.samples, plan.data, global_batch=size, evaluates=evaluates)
        for text in told:
            events.write(Note(text=text))
    check_alike(model, {"train": train_data, "validation": validation_data}, seed=seed)
    frozen = freeze_(
        model, plan.freeze, step=copied.step if copied else checkpoint.step_of(resumed)
    )
    begin_training_(model)
    undecayed = norms_and_biases(model)  # later, modules have other classes and parts of parameters
    parts = divide_parameters_among_ranks_(model, plan)
    trial = first_micro_batch(train_data) if rank == 0 else None
    nominal, samples = agree_on_targets(plan, trial, train_data, events)
    groups = agree_on_groups(model, plan, trial, events)
    stage = agree_on_stage_(model, plan, trial)
    divide_among_ranks_(model, plan)
    prepare_blocks_(model, plan.train)
    groups = stage.own_groups(model, groups)
    given = names_to_restore(plan, copied, resumed)
    sharded, tiers, waits_counted = shard_and_fill_(
        model, plan, rundir, groups, parts, stage, given=given
    )
    max_steps = plan.train.max_steps
    optimizer = ShardOptimizer(plan.optim, max_steps=max_steps, tiers=tiers, undecayed=undecayed)
    optimizer.add(sharded.trained())
    run = Run(
        plan=plan,
        rundir=rundir,
        rank=rank,
        device=device,
        sharded=sharded,
        optimizer=optimizer,
        tiers=tiers,
        waits_counted=waits_counted,
        gradients=gradients.watch(sharded, frozen=frozen.reasons),
        nominal_targets=nominal,
        trial=samples,
        train_data=train_data,
        validation_data=validation_data,
        events=events,
        loss_scale=LossScale.for_precision(plan.train.precision),
        stop_requested=stop,
        saver=Saver.make(plan, rundir, events),
        sources={} if rank else sources_of(plan, num_samples=len(train_data.samples)),
        copies=copies,
        heartbeat=heartbeat or HeartbeatWriter(),
    )
    run.saver.beat = lambda: run.at(run.phase)
    if isinstance(train_data.samples, StreamSamples):
        train_data.samples.beat = run.saver.beat
    if plan.train.on_gradients:
        run.on_gradients = import_target("train.on_gradients", plan.train.on_gradients)
    if plan.train.metrics:
        run.metrics = import_target("train.metrics", plan.train.metrics)
    if plan.data.pairs:
        add_references_(run)
    elif plan.model.distill is not None:
        ask_teacher_(run)
    seed_all(seed * 100_003 + rank // plan.mesh.tp)  # dropout differs where activations do
    if copied is not None:
        memory_state.restore(run, copied)
    elif resumed is not None:
        checkpoint.restore(run, resumed)
    if copies is not None:
        copies.begin(copied, run.step)
        copies.beside = BesideGradients(device) if device.type == "cuda" else None
    if tiers is None and optimizer.begins_with_zeros:
        optimizer.prepare_state_()
    configure_malloc_for_steps()
    return run


def shard_and_fill_(
    model: nn.Module,
    plan: RunPlan,
    rundir: RunDir,
    groups: list[tuple[str, list[nn.Module]]],
    parts: TensorParts,
    stage: Stage,
    *,
    given: Set[str] = frozenset(),
) -> tuple[ShardedModel, Tiers | None, bool]:
    """Shard the model's groups, and give their parameters storage and values in their tiers.

    Parameters and buffers whose names are in `given` may be left without values.
    Also returns whether `engine.waiting` counts all that a rank waits for others in a step.
    """
    mesh = make_mesh(plan.plugin, plan.cluster.device, parts, stage)
    tiers = None
    if plan.plugin.budget is not None:
        sizes = measure_bytes(model, groups, plan, state_ratio(plan.optim))
        tiers = Tiers(plan, rundir, sizes, estimate_non_model_bytes(plan, sizes))
    offloads = tiers.policy.offloads if tiers else lambda index: False
    sharded = shard_(model, plan, mesh, groups, offloads=offloads, parts=parts, stage=stage)
    stage.install_(model)
    transport = install(sharded)
    alone = plan.plugin.dp_shard == 1
    shared_params = share_parameters(sharded) if transport is not None or alone else None
    if tiers is not None:
        tiers.attach(sharded, shared_params)
    allocate_parameters_(sharded, plan, shared_params, tiers, given)
    check_filled_alike(model)
    is_cpu = plan.cluster.device == "cpu"
    if is_cpu and transport is None and mesh.size() > 1:
        count_waits_(sharded)
    return sharded, tiers, is_cpu


def allocate_parameters_(
    sharded: ShardedModel,
    plan: RunPlan,
    shared_params: SharedParameters | None,
    tiers: Tiers | None,
    given: Set[str],
) -> None:
    """Give the parameters storage in their tiers, and values. All ranks must call."""

    def allocate(fresh: bool) -> None:
        if shared_params is not None:
            shared_params.allocate(fresh)
        if tiers is not None:
            tiers.move_parameters(fresh)
        if shared_params is not None:
            shared_params.populate()

    release = tiers.release if tiers is not None else lambda tensor: None
    device, seed = plan.cluster.device, plan.train.seed
    uses_disk = tiers is not None and tiers.placement.uses_disk
    has_room = device != "cpu" and not uses_disk  # the host holds less than it will later
    materialise_(
        sharded,
        device=device,
        seed=seed,
        allocate=allocate,
        release=release,
        given=given,
        ahead_bytes=AHEAD_BYTES * plan.cluster.threads_per_rank if has_room else 0,
    )


def agree_on_groups(
    model: nn.Module, plan: RunPlan, trial: dict[str, Tensor] | None, events: EventWriter
) -> list[tuple[str, list[nn.Module]]]:
    """Return the groups that rank 0 finds with its micro-batch `trial`.

    The other ranks do not search: a user's forward may behave differently there.
    """
    found: Any = None
    if dist.get_rank() == 0:
        if plan.plugin.chunk_bytes is not None and not HAS_SEVERAL_MODULES:
            events.write(Note(text=UNPACKED))
        groups = find_groups(
            model,
            chunk_bytes=plan.plugin.chunk_bytes,
            batch=trial,
            kind=lambda name: stays_gathered(name, plan.plugin),
            split=plan.plugin.split_blocks,
            tell=(lambda text: events.write(Note(text=text))) if is_gathered(plan) else None,
        )
        names = {id(module): name for name, module in model.named_modules()}
        inside = [(name, [names[id(m)] for m in modules]) for name, modules in groups]
        found = inside, [n for n, m in model.named_modules() if hasattr(m, CHANGES_INPUTS)]
    inside, changing = exchange.broadcast(found)
    for name in changing:
        setattr(model.get_submodule(name), CHANGES_INPUTS, True)
    groups = [(name, [model.get_submodule(m) for m in members]) for name, members in inside]
    check_dtypes(model, groups, plan.model, plan.freeze)
    return groups


def agree_on_stage_(model: nn.Module, plan: RunPlan, trial: dict[str, Tensor] | None) -> Stage:
    """Leave this rank's stage of the model, whose blocks rank 0 finds with its micro-batch."""
    mesh = plan.mesh
    if mesh.pp == 1:
        return Stage()
    found = None if trial is None else to_plain(find_sequence(model, trial))
    sequence = from_plain(BlockSequence, exchange.broadcast(found))
    if sequence.against or sum(mesh.pp_split) != len(sequence.blocks):
        problem = sequence.against or f"it has {len(sequence.blocks)} blocks, not {mesh.pp_split}"
        raise ColotrainError(f"mesh.pp={mesh.pp}: {plan.model.value}: {problem}", "set mesh.pp=1")
    index = dist.get_rank() // (dist.get_world_size() // mesh.pp)
    dtype = cast_dtype(plan.train.precision)
    return keep_stage_(
        model, sequence, mesh.pp_split, index, chunks=mesh.pp_chunks, compute_dtype=dtype
    )


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
        stage=stage.index if stage.count > 1 else None,
    )
    run.events.write(started)
    if run.rank == 0:
        run.events.write(describe_parameters(run.sharded.module, stage.holders))
        if run.tiers is not None:
            run.events.write(run.tiers.policy.describe(run.step))
