"""Measured memory peaks of finished runs, for later plans of the same shape.

The memory that malloc adds to live tensors depends on the order of a model's allocations: it is
estimated for the first run and known afterwards. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib import metadata

from colotrain import cache_folder
from colotrain.planner.layout import Layout
from colotrain.planner.memory import Estimate, around
from colotrain.records import to_plain
from colotrain.spec.axes import MeshPlan
from colotrain.spec.offload import Budget
from colotrain.spec.plan import DataPlan, ModelPlan, TrainPlan
from colotrain.spec.survey import Survey, Trace

LENGTHS = (
    *("max_steps", "seed", "eval_every", "stop_early", "epochs", "epoch_steps", "num_validation"),
    *("on_nonfinite", "max_rollbacks", "last_batch", "profile", "precision"),
)
"""Settings under `train` that a peak does not depend on, or that its layout has already."""
RANGE = 0.05
"""Share by which peaks of equal runs differ at most."""


def shape_of(
    layout: Layout,
    survey: Survey,
    trace: Trace | None,
    budget: Budget | None,
    before: Estimate | None = None,
    *,
    model: ModelPlan,
    data: DataPlan,
    train: TrainPlan,
    mesh: MeshPlan,
) -> str:
    """Digest of everything in a plan that its peak depends on, also where it could not be traced.

    Of the allocations in a trace their order counts, too.
    """
    micro_batch = None if trace is None else (trace.storages, trace.input_bytes, trace.buffer_bytes)
    tiers = None if budget is None else (budget.device_bytes, budget.host_bytes)
    order = [(s.phase, s.block, s.events) for s in trace.segments] if trace else None
    settings = {name: value for name, value in to_plain(train).items() if name not in LENGTHS}
    about = [to_plain(layout), to_plain(survey.parameters), micro_batch, order, tiers]
    about += [to_plain(mesh), to_plain(model), data.of_samples(), settings]
    if before is not None:
        about.append(to_plain(before.breakdown))
    known = json.dumps([*about, metadata.version("torch")], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def remember(shape: str, measured_bytes: int) -> None:
    """Store the measured peak of the rank with the highest."""
    cache_folder.write("peaks", f"{shape}.json", json.dumps({"peak_bytes": measured_bytes}))


def recall(shape: str) -> int | None:
    """Measured peak of an earlier run of this shape, in bytes; None if there is none."""
    try:
        found = cache_folder.read("peaks", f"{shape}.json")["peak_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def corrected(estimate: Estimate, measured_bytes: int) -> Estimate:
    """Replace the estimated peak by a measured one; transient categories take the difference."""
    breakdown, missing = estimate.breakdown, measured_bytes - estimate.breakdown.total
    for name in ("buffers", "activations", "gathered", "baseline"):
        change = max(missing, -getattr(breakdown, name))
        breakdown = replace(breakdown, **{name: getattr(breakdown, name) + change})
        missing -= change
    exact = min(estimate.peak.exact, measured_bytes)
    beside = estimate.peak.high - around(estimate.breakdown.total, exact=0).high
    peak = around(breakdown.total, exact=exact, share=RANGE, beside=max(0, beside))
    return Estimate(breakdown=breakdown, peak=peak)
