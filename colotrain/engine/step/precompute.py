"""The pass before the first step in which a model says of each sample what the objective needs.

Of preference pairs it is the model as the run begins, their reference; in a distillation it is the
teacher. What they say is kept in files of the run directory: no second model is in memory while the
run trains, and a resumed run reads the same values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.prepare.identity import identities
from colotrain.data.prepare.prepared import Split
from colotrain.data.read.ahead import AheadLoader
from colotrain.data.read.loader import Samples, stack
from colotrain.data.read.precomputed import WithPrecomputed, wanted
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import to_device
from colotrain.engine.model.unchanged import unchanged
from colotrain.engine.pipeline.forward_only import through_stages
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.events.kinds import Note
from colotrain.models import adapters, huggingface
from colotrain.models.loading import build_whole
from colotrain.models.objective import kept_of
from colotrain.models.objectives.base import Kept
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.axes import Axis
from colotrain.spec.plan import RunPlan
from colotrain.spec.teacher import PART_BYTES, teacher_of


def _depends_on(plan: RunPlan, kept: Kept) -> dict[str, Any]:
    """All that the entries depend on, as plain data."""
    teacher = teacher_of(plan.model, plan.train.precision)
    begins = None if teacher else [plan.train.seed, plan.train.precision]
    model = teacher or replace(plan.model, objective=None)
    data = to_plain(plan.data)
    # these change no sample, and what files hold is in their identities, wherever they are
    data |= dict.fromkeys(("workers", "num_workers", "shuffle", "paths", "validation_paths"))
    return {
        "model": to_plain(model),
        "directory": huggingface.fingerprint(Path(model.hf)) if model.hf else None,
        "merged": adapters.identities(model.adapter) if model.adapter else [],
        "begins": begins,
        "settings": kept.settings,
        "data": [data, *identities(plan.data)],
    }


def with_precomputed(samples: Samples, plan: RunPlan, split: Split, rundir: RunDir) -> Samples:
    """The samples with what the pass before the first step says of them, if there is one."""
    kept = kept_of(plan.model)
    if kept is None:
        return samples
    content = json.dumps(_depends_on(plan, kept), sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()
    folder = rundir.precomputed / f"{kept.entry}-{key[:16]}"
    return WithPrecomputed(
        samples, kept.entry, kept.empty, rundir=rundir, folder=folder, split=split
    )


@contextmanager
def asked(run: Run) -> Iterator[tuple[nn.Module, Stage]]:
    """The model that says something of each sample, and what this rank has of it.

    All ranks must call.

    A teacher is whole on every rank meanwhile; the run's own model must have its first weights.
    """
    teacher = teacher_of(run.plan.model, run.plan.train.precision)
    if teacher is not None:
        yield build_whole(teacher, seed=0).to(run.device).eval(), Stage()
        return
    with unchanged(run.sharded.module, run.device):
        yield run.sharded.module, run.sharded.stage
    reshard(run.sharded)


def precompute(run: Run) -> None:
    """Compute what is not known yet of the samples that the run reads. All ranks must call.

    A run that is asked to stop keeps what is known by then, and has a reason to stop afterwards.
    """
    kept, plan = kept_of(run.plan.model), run.plan
    if kept is None:
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
                what = kept.what.format(num=len(ids), split=split)
                run.events.write(Note(text=f"{what} are computed once"))
    if unknown:
        with torch.no_grad(), asked(run) as (model, stage):
            for samples, ids in unknown:
                if run.stop.reason is None:  # the same on every rank
                    compute(run, model, stage, samples, ids, kept)
    dist.barrier()
    for loader in (run.train_data, run.validation_data):
        if isinstance(loader, AheadLoader):
            loader.restart()


def compute(
    run: Run,
    model: nn.Module,
    stage: Stage,
    samples: WithPrecomputed,
    ids: list[int],
    kept: Kept,
) -> None:
    """Write the rows of this reader's part of `ids`. All ranks must call, with as many forwards.

    Where a rank is asked to stop, `run.stop.reason` says so on all, and the rest are left out.
    """
    size, ranks = run.plan.batch.micro_batch, run.plan.ranks
    writes = run.sharded.stage.is_last and ranks.is_first(run.rank, Axis.CP, Axis.TP)
    done: list[int] = []
    found: list[Tensor] = []
    for start in range(0, len(ids), size * ranks.readers):
        if is_to_stop(run):
            break
        run.at(kept.phase)
        first = start + ranks.reader(run.rank) * size
        own = ids[first : first + size]
        padded = (own + ids[-1:] * size)[:size]
        batch = to_device(stack([(i, samples.samples[i]) for i in padded]), run.device)
        run.sharded.calls.clear()
        rows = through_stages(stage, model, kept.rows, batch)
        if rows is not None and writes:
            done, found = [*done, *own], [*found, *rows[: len(own)].cpu()]
        if found and len(found) * found[0].nbytes >= PART_BYTES:
            samples.write(done, found)
            done, found = [], []
    if found:
        samples.write(done, found)


def is_to_stop(run: Run) -> bool:
    """Whether any rank is asked to stop; `run.stop.reason` is set then. All ranks must call."""
    own = run.stop.wanted()
    if exchange.is_any(own is not None):
        run.stop.reason = own or "another rank"
    return run.stop.reason is not None
