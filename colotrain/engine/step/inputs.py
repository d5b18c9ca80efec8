"""The data of a rank, and the modules of the user's that a run calls."""

from __future__ import annotations

from torch import Tensor

from colotrain.data.read.ahead import read_ahead
from colotrain.data.read.loader import (
    BatchLoader,
    Samples,
    Split,
    count_evaluated,
    open_samples,
    planned_collate,
    planned_draw_seed,
    planned_order,
)
from colotrain.data.read.samples import rest_of
from colotrain.dotted import import_target
from colotrain.engine.step.precompute import with_precomputed
from colotrain.generators import seeded
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan


def import_targets(plan: RunPlan) -> None:
    """Import the user's modules with the same random numbers on every rank."""
    named = {
        "model.target": plan.model.target,
        "data.target": plan.data.target,
        "data.collate": plan.data.collate,
        "train.metrics": plan.train.metrics,
        "train.on_gradients": plan.train.on_gradients,
    }
    with seeded(plan.train.seed):
        for key, dotted in named.items():
            if dotted:
                import_target(key, dotted)


def open_loaders(
    plan: RunPlan, rank: int, rundir: RunDir
) -> tuple[BatchLoader, BatchLoader | None]:
    """Return the micro-batches of both splits; None where there is no validation split."""
    train = _open(plan, "train")
    rest = rest_of(train)
    found = _loader(plan, "train", train, rank, rundir)
    assert found is not None, "training data without samples is refused"
    validation = _open(plan, "validation") if rest is None else rest
    return found, _loader(plan, "validation", validation, rank, rundir)


def _open(plan: RunPlan, split: Split) -> Samples:
    with seeded(plan.train.seed):  # a builder that shuffles must do so alike in each call
        return open_samples(plan.data, split)


def _loader(
    plan: RunPlan, split: Split, samples: Samples, rank: int, rundir: RunDir
) -> BatchLoader | None:
    end = count_evaluated(samples, plan) or None if split == "validation" else None
    if split == "validation" and len(samples) == 0:
        return None
    order = planned_order(samples, plan, split)
    loader = BatchLoader(
        with_precomputed(samples, plan, split, rundir),
        order,
        plan.batch,
        rank=plan.ranks.reader(rank),
        draw_seed=planned_draw_seed(samples, plan),
        end=end,
        collate=planned_collate(plan.data),
    )
    return read_ahead(loader, plan)


def first_micro_batch(data: BatchLoader) -> dict[str, Tensor]:
    """Return the first micro-batch of rank 0, the same on every rank."""
    first = BatchLoader(
        data.samples,
        data.order,
        data.batch,
        rank=0,
        draw_seed=data.draw_seed,
        collate=data.collate,
    )
    return first.micro_batch(0, 0)
