"""`colotrain run` and `colotrain resume`: resolve, write, launch, follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from colotrain.cli.output import print_json, stderr_console
from colotrain.cli.resolving import check_fits, plan_from
from colotrain.errors import ColotrainError, UsageError
from colotrain.plan import RunPlan
from colotrain.rundir import RUNS, RunDir, write_atomically

if TYPE_CHECKING:
    from colotrain.observe.events import Event


def run(overrides: list[str], *, as_json: bool, force: bool = False) -> int:
    """Resolve the overrides, write the run directory and train."""
    plan = plan_from(overrides)
    if not force:
        check_fits(plan)
    rundir = RunDir(RUNS / plan.name)
    if rundir.plan_file.exists() and plan.checkpoint.resume == "none":
        raise UsageError(
            f"name={plan.name}: {rundir.path} exists",
            "choose another name, or checkpoint.resume=auto to go on with it",
        )
    return train(plan, rundir, overrides, as_json=as_json)


def resume(run: str | None, overrides: list[str], *, as_json: bool) -> int:
    """Go on with a run from its newest checkpoint; with overrides its plan is made anew."""
    rundir = RunDir.find(run)
    if not overrides:
        return train(rundir.plan(), rundir, None, as_json=as_json)
    if not rundir.config_file.is_file():
        raise UsageError(f"{rundir.path}: has no {rundir.config_file.name}", "resume it unchanged")
    arguments = [f"recipe={rundir.config_file}", *overrides, f"name={rundir.name}"]
    return train(plan_from(arguments), rundir, arguments, as_json=as_json)


def train(
    plan: RunPlan, rundir: RunDir, overrides: Sequence[str] | None, *, as_json: bool
) -> int:
    """Write the plan, prepare the data, launch, follow, and leave `summary.json`.

    `overrides` are what the plan was made from, None where it is the run's own.
    """
    from colotrain.data.tokens import prepare
    from colotrain.launch.elastic import launch
    from colotrain.observe import liveness
    from colotrain.observe.progress import preparation, print_summary, progress_for
    from colotrain.observe.view import Fold, follow, summary

    console = stderr_console()
    rundir.create()
    with liveness.claim(rundir):
        rundir.write_plan(plan)
        if overrides is not None:
            _keep_config(rundir, overrides)
        if plan.data.source != "target":
            with preparation(console) as progress:
                prepare(plan.data, progress=progress)
        fold = Fold(max_steps=plan.train.max_steps)
        with progress_for(console, plan) as shown:

            def show(events: list[Event]) -> None:
                fold.add(events)
                shown.update(fold.view(), events)

            exit_code, cause = launch(plan, rundir, follow=show)
    view = follow(rundir)
    document = summary(view, plan, rundir)
    rundir.write_summary(document)
    print_summary(console, document, plan, view=view)
    if as_json:
        print_json(document)
    if exit_code == ColotrainError.exit_code:
        raise ColotrainError(cause, f"`colotrain resume {rundir.name}` goes on from the last save")
    return exit_code


def _keep_config(rundir: RunDir, overrides: Sequence[str]) -> None:
    """Keep the composed configuration, so that the run can be resumed with changes."""
    from colotrain.config.compose import compose

    # JSON is YAML, and this file is a recipe
    write_atomically(rundir.config_file, json.dumps(compose(overrides), indent=2) + "\n")
