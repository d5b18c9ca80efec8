"""A worker of `colotrain verify`: trains every case of one world size with colotrain's engine.

Each folder RUN/cases/NAME holds a plan; rank 0 writes the trajectory there, as safetensors and
JSON.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain.data.read.loader import BatchLoader
from colotrain.engine import loop
from colotrain.engine.gradients import gradients
from colotrain.engine.worker import StopRequest, connect, prepare
from colotrain.events.kinds import CaseDone, Step, WorkerFinished, WorkerStopped
from colotrain.events.log import EventReader, EventWriter
from colotrain.rundir import RunDir
from colotrain.verify.masks import MaskedSamples, without_dropout


def main(path: str) -> int:
    rundir = RunDir(path)
    stop = StopRequest(rundir)
    device = connect(rundir.plan())
    progress = EventWriter(rundir.event_file(rank=dist.get_rank(), attempt=0))
    for folder in sorted(rundir.cases.iterdir()):
        if train_case(RunDir(folder), device, stop) == "stopped":
            progress.write(WorkerStopped(step=0, reason="asked to stop"))
            break
        progress.write(CaseDone(name=folder.name))
    else:
        progress.write(WorkerFinished(step=0))
    dist.destroy_process_group()
    return 0


def train_case(case: RunDir, device: torch.device, stop: StopRequest) -> str:
    """Train one case, and write everything that is compared with the reference.

    Where fp16's loss scale makes the run skip steps, which the reference never does, the case is
    trained again with the lower scale that resulted.
    """
    plan, rank = case.plan(), dist.get_rank()
    if rank == 0:
        case.create()
    dist.barrier()
    scale: float | None = None
    for attempt in itertools.count():
        events = EventWriter(case.event_file(rank=rank, attempt=attempt))
        run = prepare(plan, case, device=device, events=events, stop=stop)
        began_with = run.loss_scale.scale = scale or run.loss_scale.scale
        run.train_data = masked_loader(run.train_data)
        recorder = Recorder()
        run.on_gradients = recorder.record
        with without_dropout(run.sharded.module):
            outcome, scale = loop.train(run), run.loss_scale.scale
        if scale >= began_with or outcome == "stopped":
            break
    recorder.parameters.append(_whole(run.sharded.module))
    if rank == 0:
        write(case, recorder, run, attempt)
    dist.barrier()
    return outcome


def masked_loader(loader: BatchLoader) -> BatchLoader:
    """The loader with the same masks on its samples as the reference's."""
    samples, seed = MaskedSamples(loader.samples), loader.draw_seed
    return BatchLoader(samples, loader.order, loader.batch, rank=loader.rank, draw_seed=seed)


class Recorder:
    """Collects the unsharded gradients and parameters before each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: list[dict[str, Tensor]] = []

    def record(self, model: nn.Module, step: int) -> None:
        whole = {}
        for view in gradients.read(model):
            full = view.full()  # collective, so for every parameter on every rank
            if view.local is not None:
                whole[view.name] = full.cpu()
        self.gradients.append(whole)
        self.parameters.append(_whole(model))


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Name → unsharded value of every parameter; all ranks must call."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
        for name, p in model.named_parameters()
    }


def write(case: RunDir, recorder: Recorder, run: loop.Run, attempt: int) -> None:
    tensors: dict[str, Tensor] = {}
    for step, values in enumerate(recorder.gradients):
        tensors |= {f"gradient.{step}.{n}": t.contiguous() for n, t in values.items()}
    for step, values in enumerate(recorder.parameters):
        tensors |= {f"parameter.{step}.{n}": t.contiguous() for n, t in values.items()}
    save_file(tensors, case.trajectory_file)
    found = [e for e in EventReader(case, ranks={0}).drain() if e.attempt == attempt]
    steps = [Step.of(event) for event in found if event.kind == Step.KIND]
    facts = {
        "losses": [step.loss for step in steps if step.loss is not None],
        "optimizer_steps": run.optimizer.steps,
        "frozen": sorted(run.gradients.frozen),
    }
    Path(case.verification_file).write_text(json.dumps(facts), "utf-8")
