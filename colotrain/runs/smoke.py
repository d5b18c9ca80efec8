"""Report of a smoke run (`run --smoke`)."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import psutil

from colotrain.rundir import RunDir
from colotrain.show.formatting import shown_loss
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration, short_size

if TYPE_CHECKING:
    from colotrain.events.view import RunView

SAVED_STEP = 1


def report(view: RunView, plan: RunPlan, rundir: RunDir) -> dict[str, Any]:
    """Return the `smoke` section of the summary: whether the run passed, and its cost.

    `seconds` counts from the start of the command and includes the preparation of the data.
    """
    saved = rundir.checkpoint(SAVED_STEP)
    resumed = SAVED_STEP in view.resumed
    return {
        "passed": view.status == "finished" and view.steps == plan.train.max_steps and resumed,
        "resumed_from_step": SAVED_STEP if resumed else None,
        "checkpoint_bytes": sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()),
        "evaluations": len(view.evals),
        "seconds": time.time() - psutil.Process().create_time(),
    }


def close(document: dict[str, Any], plan: RunPlan, rundir: RunDir) -> str:
    """Delete the checkpoint of a smoke run that passed; return the line that says what ran.

    The line is empty if the run did not pass; the error is reported elsewhere.
    """
    found, memory = document["smoke"], document["memory"]
    if not found["passed"]:
        return ""
    shutil.rmtree(rundir.checkpoint(SAVED_STEP), ignore_errors=True)
    batch, evals = plan.batch, found["evaluations"]
    each = (
        "a micro-batch"
        if batch.accumulation_steps == 1
        else f"{batch.accumulation_steps} micro-batches"
    )
    evaluated = (
        f"{evals} evaluation{'s' * (evals > 1)}" if evals else "no evaluation (the plan has none)"
    )
    predicted = short_size(memory["predicted_peak"])
    peak = short_size(max(memory["peak_by_rank"], default=0))
    loss = shown_loss(document["loss"]["last"])
    return (
        f"smoke run passed in {short_duration(found['seconds'])}: {plan.plugin.name} on "
        f"{plan.world_size} {plan.cluster.device} rank{'s' * (plan.world_size > 1)}, "
        f"{document['steps']} steps of {each} (loss {loss}), {evaluated}, a checkpoint of "
        f"{short_size(found['checkpoint_bytes'])} written, resumed from and removed; "
        f"peak {peak} per rank ({predicted} predicted)"
    )
