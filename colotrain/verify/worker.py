"""A worker of `colotrain verify`: trains every case of one world size with colotrain's engine.

Each folder RUN/cases/NAME holds a plan; rank 0 writes the trajectory there.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.read.loader import BatchLoader
from colotrain.engine.comms import exchange
from colotrain.engine.comms.process import StopRequest, connect
from colotrain.engine.gradients import gradients
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.evaluation import RESERVED
from colotrain.engine.step.participants import OnGradients
from colotrain.engine.step.train import train
from colotrain.engine.worker import prepare
from colotrain.errors import ColotrainError
from colotrain.events.event import Event
from colotrain.events.kinds import CaseDone, Evaluation, Step, WorkerFinished, WorkerStopped
from colotrain.events.log import EventReader, EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan
from colotrain.verify import quantized
from colotrain.verify.masks import MaskedSamples, without_dropout
from colotrain.verify.trajectory import Trajectory, save


def main(path: str, digest: str, *case_digests: str) -> int:
    """Train the cases of the run in `path`; the digests are those of its plan and of its cases'."""
    rundir = RunDir(path)
    stop = StopRequest(rundir)
    device = connect(rundir.plan(digest))
    progress = EventWriter(rundir.event_file(rank=dist.get_rank(), attempt=0), inside=rundir.path)
    for folder, case_digest in zip(sorted(rundir.cases.iterdir()), case_digests, strict=True):
        case = RunDir(folder)
        if train_case(case.plan(case_digest), case, device, stop) == "stopped":
            progress.write(WorkerStopped(step=0, reason="asked to stop"))
            break
        progress.write(CaseDone(name=folder.name))
    else:
        progress.write(WorkerFinished(step=0))
    dist.destroy_process_group()
    return 0


def train_case(plan: RunPlan, case: RunDir, device: torch.device, stop: StopRequest) -> str:
    """Train one case, and write everything that is compared with the reference.

    A case with checkpoints stops in the middle, and goes on from the one that it saves then. Where
    fp16's loss scale makes the run skip steps, which the reference never does, the case is trained
    again with the lower scale that resulted.
    """
    rank, attempts, scale = dist.get_rank(), itertools.count(), None
    while True:
        if rank == 0:
            shutil.rmtree(case.checkpoints, ignore_errors=True)
            case.create()
        dist.barrier()
        recorder, numbers = Recorder(), list[int]()

        def stop_in_middle(recorder: Recorder = recorder) -> str | None:
            is_there = len(recorder.gradients) >= plan.train.max_steps // 2
            return stop() or ("the middle" if is_there else None)

        for stops in (stop_in_middle, stop) if plan.checkpoint.enabled else (stop,):
            numbers.append(next(attempts))
            events = EventWriter(case.event_file(rank=rank, attempt=numbers[-1]), inside=case.path)
            run = prepare(plan, case, device=device, events=events, stop=stops)
            if len(numbers) == 1:
                began_with = run.loss_scale.scale = scale or run.loss_scale.scale
            elif run.step == 0:
                raise ColotrainError("the case did not go on from its checkpoint", "report this")
            outcome = train_part(run, plan, recorder)
        scale = run.loss_scale.scale
        if scale >= began_with or outcome == "stopped":
            break
    recorder.parameters.append(_whole(run.sharded.module))
    if rank == 0:
        save(trajectory_of(case, recorder, run, numbers), case)
    dist.barrier()
    return outcome


def train_part(run: Run, plan: RunPlan, recorder: Recorder) -> str:
    """Train with the reference's masks and without dropout, and record every step."""
    run.train_data = masked_loader(run.train_data, plan)
    run.plan = replace(plan, train=replace(plan.train, on_gradients=None))
    with without_dropout(run.sharded.module):
        return train(run, partial(OnGradients, function=recorder.record))


def masked_loader(loader: BatchLoader, plan: RunPlan) -> BatchLoader:
    """The loader with the same masks on its samples as the reference's."""
    ignored = plan.train.ignore_index
    samples = MaskedSamples(loader.samples, whole=bool(plan.data.rows), ignored=ignored)
    seed = loader.draw_seed
    return BatchLoader(
        samples,
        loader.order,
        loader.batch,
        rank=loader.rank,
        draw_seed=seed,
        collate=loader.collate,
    )


class Recorder:
    """Collects the unsharded gradients and parameters before each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: list[dict[str, Tensor]] = []

    def record(self, model: nn.Module, step: int) -> None:
        rows = {v.name: (v.begin, v.local) for v in gradients.read(model)}
        self.gradients.append(_gather({n: (o, g) for n, (o, g) in rows.items() if g is not None}))
        self.parameters.append(_whole(model))


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Name → unsharded value of every parameter on rank 0; all ranks must call."""
    begins = {view.name: view.begin for view in gradients.read(model)}
    held = module_tree.named_parameters(model)
    own = {n: p for n, p in held if not p.is_meta}  # others: on another stage
    gathered = _gather({n: (begins[n], local_part(p)) for n, p in own.items()})
    return quantized.with_weights(model, gathered)


Index = tuple[int, ...]


def _gather(own: dict[str, tuple[Index, Tensor]]) -> dict[str, Tensor]:
    """Join each rank's part, given with the index of its first element, on rank 0.

    A few collectives for all of them: DTensor's `full_tensor` took a third of a small case's time.
    Returns an empty dict on the other ranks. All ranks must call.
    """
    begins = exchange.all_gather({name: first for name, (first, _) in own.items()})
    ranks = exchange.gather_tensors({name: tensor for name, (_, tensor) in own.items()})
    found: dict[str, dict[Index, Tensor]] = {}
    for begin, rank in zip(begins, ranks, strict=False):
        for name, tensor in rank.items():
            first = tuple(begin[name])
            pieces = found.setdefault(name, {})
            if first in pieces and not equal(pieces[first], tensor):
                pieces[first] = torch.full_like(tensor, torch.nan)
            elif tensor.numel() or not pieces:
                pieces.setdefault(first, tensor)
    return {name: _join(pieces) for name, pieces in found.items()}


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks hold the same bits of what both hold; NaN tells that they do not."""
    same = one.shape == other.shape and torch.equal(one, other)
    has_nan = one.is_floating_point() or one.is_complex()
    return same or not has_nan or not bool(torch.isfinite(one).all())


def _join(pieces: dict[Index, Tensor]) -> Tensor:
    """Put the parts of a tensor in their places."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    ends = [[n + size for n, size in zip(i, t.shape, strict=True)] for i, t in pieces.items()]
    whole = next(iter(pieces.values())).new_empty([max(sizes) for sizes in zip(*ends, strict=True)])
    for begin, tensor in pieces.items():
        place = [slice(n, n + size) for n, size in zip(begin, tensor.shape, strict=True)]
        whole[tuple(place)] = tensor
    return whole


def evaluated(events: list[Event], step: int) -> dict[str, float]:
    """Loss and metrics of the evaluation after the last step; empty where there was none."""
    every = [Evaluation.of(event) for event in events if event.kind == Evaluation.KIND]
    for last in every[-1:]:
        if last.step == step and last.loss is not None:
            return {**(last.metrics or {}), RESERVED: last.loss}
    return {}


def trajectory_of(case: RunDir, recorder: Recorder, run: Run, attempts: list[int]) -> Trajectory:
    """Return what is compared of a case; `attempts` are those that trained it."""
    found = [e for e in EventReader(case, ranks={0}).drain() if e.attempt in attempts]
    steps = [Step.of(event) for event in found if event.kind == Step.KIND]
    return Trajectory(
        losses=[step.loss for step in steps if step.loss is not None],
        evaluation=evaluated(found, run.step),
        gradients=recorder.gradients,
        parameters=recorder.parameters,
        optimizer_steps=run.optimizer.steps,
        frozen=quantized.without_scales(run.sharded.module, frozenset(run.sharded.parts.frozen)),
    )
