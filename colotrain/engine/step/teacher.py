"""The pass before the first step in which a distillation's teacher says what it knows.

Every rank holds the teacher whole while the pass lasts, and computes some of the samples; what it
says is kept in files of the run directory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.prepare.identity import identities
from colotrain.data.read.ahead import AheadLoader
from colotrain.data.read.loader import stack
from colotrain.data.read.teacher import WithTeacher, wanted
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import to_device
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.references import is_to_stop
from colotrain.events.kinds import Note
from colotrain.models import huggingface
from colotrain.models.distillation import as_teacher
from colotrain.models.loading import build_whole
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.phases import Phase
from colotrain.spec.plan import RunPlan
from colotrain.spec.teacher import PART_BYTES, teacher_of


def folder_of(plan: RunPlan, rundir: RunDir) -> Path:
    """The folder of the teacher's rows, named by a hash of all that they depend on."""
    assert plan.model.distill is not None
    teacher = teacher_of(plan.model.distill, plan.train.precision)
    data = to_plain(plan.data)
    data |= dict.fromkeys(("workers", "num_workers", "shuffle"))  # which change no sample
    content = {
        "distill": {**to_plain(plan.model.distill), "alpha": None},
        "directory": huggingface.fingerprint(Path(str(teacher.hf))),
        "dtype": teacher.args,
        "data": [data, *identities(plan.data)],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return rundir.teacher / key[:16]


def ask_teacher_(run: Run) -> None:
    """Compute what the teacher says of the samples that the run reads. All ranks must call.

    A run that is asked to stop keeps what is known by then, and has a reason to stop afterwards.
    """
    assert run.plan.model.distill is not None
    asked = teacher_of(run.plan.model.distill, run.plan.train.precision)
    teacher: nn.Module | None = None
    for split, loader, positions in (
        ("train", run.train_data, run.plan.train.max_steps * run.plan.batch.global_batch),
        ("validation", run.validation_data, run.validation_data and run.validation_data.end),
    ):
        if loader is None or not positions or run.stop.reason is not None:
            continue
        samples = loader.samples
        assert isinstance(samples, WithTeacher)
        unknown: list[int] = []
        if run.rank == 0:
            ids = wanted(loader.order, len(samples), positions).tolist()
            unknown = [index for index in ids if not samples.knows(index)]
        unknown = exchange.broadcast(unknown)
        if unknown:
            if run.rank == 0:
                text = f"the teacher's {len(unknown)} {split} samples are computed once"
                run.events.write(Note(text=text))
            if teacher is None:
                teacher = build_whole(asked, seed=0).to(run.device).eval()
            compute(run, teacher, samples, unknown)
        dist.barrier()
    for loader in (run.train_data, run.validation_data):
        if isinstance(loader, AheadLoader):
            loader.restart()


@torch.no_grad()
def compute(run: Run, teacher: nn.Module, samples: WithTeacher, ids: list[int]) -> None:
    """Write the teacher's rows of this rank's part of `ids`. All ranks must call."""
    plan, size, world = run.plan.model.distill, run.plan.batch.micro_batch, dist.get_world_size()
    assert plan is not None
    done: list[int] = []
    rows: list[Tensor] = []
    for start in range(0, len(ids), size * world):
        if is_to_stop(run):
            break
        run.at(Phase.TEACHER)
        first = start + run.rank * size
        own = ids[first : min(first + size, start + size * world)]
        if not own:
            continue
        batch = to_device(stack([(i, samples.samples[i]) for i in own]), run.device)
        with as_teacher(plan):
            found = teacher(**batch)[0].unflatten(0, batch["labels"].shape)
        done, rows = [*done, *own], [*rows, *found.cpu()]
        if len(rows) * rows[0].nbytes >= PART_BYTES:
            samples.write(done, rows)
            done, rows = [], []
    if rows:
        samples.write(done, rows)
