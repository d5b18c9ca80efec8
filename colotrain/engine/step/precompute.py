"""The pass before the first step in which a model says of each sample what the objective needs.

Of preference pairs it is the model as the run begins, their reference; in a distillation it is the
teacher. What they say is kept in files of the run directory: no second model is in memory while the
run trains, and a resumed run reads the same values.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.data.prepare.identity import identities
from colotrain.data.prepare.prepared import Split
from colotrain.data.read.ahead import AheadLoader
from colotrain.data.read.loader import Samples, stack
from colotrain.data.read.precomputed import WithPrecomputed, wanted
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import to_device
from colotrain.engine.model.unchanged import unchanged
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.events.kinds import Note
from colotrain.models import distillation, huggingface, preferences
from colotrain.models.loading import build_whole
from colotrain.models.loss import by_token
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.phases import Phase
from colotrain.spec.plan import RunPlan
from colotrain.spec.teacher import PART_BYTES, teacher_of

(UNKNOWN,) = struct.unpack("=i", struct.pack("=f", math.nan))
"""The bits of a float NaN, as an integer: what is not known makes the loss NaN."""

Rows = Callable[[Mapping[str, Tensor]], Tensor]
"""What the model says of a batch [samples, ...]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Who says what of each sample."""

    entry: str
    """Name of it in a batch."""
    unknown: Callable[[Tensor], Tensor]
    """The entry of a sample with these labels of which nothing is known."""
    depends_on: Callable[[RunPlan], Any]
    """All that it depends on, as plain data."""
    begin: Callable[[Run], AbstractContextManager[Rows]]
    """All ranks must call it, and what it returns."""
    phase: Phase
    what: str
    """`the teacher's {num} {split} samples`."""


@contextmanager
def _reference(run: Run) -> Iterator[Rows]:
    """Log-probabilities [pairs, 2] under the run's model, which must have its first weights."""
    model = run.sharded.module

    def rows(batch: Mapping[str, Tensor]) -> Tensor:
        run.sharded.calls.clear()
        with by_token():
            output = model(**preferences.inputs_of(batch))
        return preferences.log_probs_of(batch, output)

    with unchanged(model, run.device):
        yield rows
    reshard(run.sharded)


def _of_reference(plan: RunPlan) -> dict[str, Any]:
    return {
        "model": {**to_plain(plan.model), "dpo_beta": None},
        "directory": huggingface.fingerprint(Path(plan.model.hf)) if plan.model.hf else None,
        "seed": plan.train.seed,
        "precision": plan.train.precision,
        "data": identities(plan.data),
        "seq_len": plan.data.seq_len,
    }


@contextmanager
def _teacher(run: Run) -> Iterator[Rows]:
    """Rows [samples, seq, 2k + 1] of the teacher, which every rank holds whole meanwhile."""
    plan = run.plan.model.distill
    assert plan is not None
    asked = teacher_of(plan, run.plan.train.precision)
    teacher = build_whole(asked, seed=0).to(run.device).eval()

    def rows(batch: Mapping[str, Tensor]) -> Tensor:
        with distillation.as_teacher(plan):
            found: Tensor = teacher(**batch)[0]
        return found.unflatten(0, batch["labels"].shape)

    yield rows


def _of_teacher(plan: RunPlan) -> dict[str, Any]:
    assert plan.model.distill is not None
    teacher = teacher_of(plan.model.distill, plan.train.precision)
    data = to_plain(plan.data)
    data |= dict.fromkeys(("workers", "num_workers", "shuffle"))  # which change no sample
    return {
        "distill": {**to_plain(plan.model.distill), "alpha": None},
        "directory": huggingface.fingerprint(Path(str(teacher.hf))),
        "dtype": teacher.args,
        "data": [data, *identities(plan.data)],
    }


def pass_of(plan: RunPlan) -> Pass | None:
    """The pass that the objective needs; None: it needs none."""
    if plan.data.pairs:
        return Pass(
            preferences.REFERENCE,
            lambda labels: torch.full((len(labels),), torch.nan, dtype=torch.float64),
            _of_reference,
            _reference,
            Phase.REFERENCE,
            "log-probabilities of {num} {split} pairs under the reference, the model as the run "
            "begins,",
        )
    if plan.model.distill is not None:
        width = 2 * plan.model.distill.top_k + 1
        return Pass(
            distillation.TEACHER,
            lambda labels: torch.full((len(labels), width), UNKNOWN, dtype=torch.int32),
            _of_teacher,
            _teacher,
            Phase.TEACHER,
            "the teacher's {num} {split} samples",
        )
    return None


def with_precomputed(samples: Samples, plan: RunPlan, split: Split, rundir: RunDir) -> Samples:
    """The samples with what the pass before the first step says of them, if there is one."""
    asked = pass_of(plan)
    if asked is None:
        return samples
    content = json.dumps(asked.depends_on(plan), sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()
    folder = rundir.precomputed / f"{asked.entry}-{key[:16]}"
    return WithPrecomputed(
        samples, asked.entry, asked.unknown, rundir=rundir, folder=folder, split=split
    )


def precompute(run: Run) -> None:
    """Compute what is not known yet of the samples that the run reads. All ranks must call.

    A run that is asked to stop keeps what is known by then, and has a reason to stop afterwards.
    """
    asked, plan = pass_of(run.plan), run.plan
    if asked is None:
        return
    unknown: list[tuple[WithPrecomputed, list[int]]] = []
    for split, loader, positions in (
        ("train", run.train_data, plan.train.max_steps * plan.batch.global_batch),
        ("validation", run.validation_data, run.validation_data and run.validation_data.end),
    ):
        if loader is None or not positions:
            continue
        samples, ids = loader.samples, list[int]()
        assert isinstance(samples, WithPrecomputed)
        if run.rank == 0:
            all_ids = wanted(loader.order, len(samples), positions).tolist()
            ids = [index for index in all_ids if not samples.knows(index)]
        if ids := exchange.broadcast(ids):
            unknown.append((samples, ids))
            if run.rank == 0:
                what = asked.what.format(num=len(ids), split=split)
                run.events.write(Note(text=f"{what} are computed once"))
    if unknown:
        with torch.no_grad(), asked.begin(run) as rows:
            for samples, ids in unknown:
                if run.stop.reason is None:  # the same on every rank
                    compute(run, rows, samples, ids, asked.phase)
    dist.barrier()
    for loader in (run.train_data, run.validation_data):
        if isinstance(loader, AheadLoader):
            loader.restart()


def compute(run: Run, rows: Rows, samples: WithPrecomputed, ids: list[int], phase: Phase) -> None:
    """Write the rows of this rank's part of `ids`. All ranks must call; each does as many forwards.

    Where a rank is asked to stop, `run.stop.reason` says so on all, and the rest are left out.
    """
    size, world = run.plan.batch.micro_batch, dist.get_world_size()
    done: list[int] = []
    found: list[Tensor] = []
    for start in range(0, len(ids), size * world):
        if is_to_stop(run):
            break
        run.at(phase)
        first = start + run.rank * size
        own = ids[first : first + size]
        padded = (own + ids[-1:] * size)[:size]
        batch = to_device(stack([(i, samples.samples[i]) for i in padded]), run.device)
        done, found = [*done, *own], [*found, *rows(batch).cpu()[: len(own)]]
        if found and len(found) * found[0].nbytes >= PART_BYTES:
            samples.write(done, found)
            done, found = [], []
    if found:
        samples.write(done, found)


def is_to_stop(run: Run) -> bool:
    """Whether any rank is asked to stop; `run.stop.reason` is set then. All ranks must call."""
    own = run.stop.wanted()
    asked = torch.tensor(float(own is not None), device=run.device)
    dist.all_reduce(asked)
    if asked.item():
        run.stop.reason = own or "another rank"
    return run.stop.reason is not None
