"""Running the cases of a verification: the reference here, the plugins in worker processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from colotrain.errors import ColotrainError
from colotrain.events.kinds import CaseDone
from colotrain.launch.elastic import launch
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.elastic import MemoryCopyPlan
from colotrain.spec.exit_codes import STOPPED
from colotrain.spec.plan import RunPlan
from colotrain.verify.compare import CaseResult, Tolerance, compare
from colotrain.verify.reference import along, run_reference
from colotrain.verify.trajectory import Trajectory, load

WORKER = "colotrain.verify.worker"
MOST_CASES = 16
"""Cases that one set of workers trains: their process groups, with a thread each, end with it."""
Progress = Callable[[str, int, int], None]


class WorkersFailed(ColotrainError):
    """The workers of a verification ended early; their files are kept."""


def verify(
    plans: Sequence[RunPlan],
    folder: Path,
    *,
    tolerance: Tolerance | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Iterator[CaseResult]:
    """Compare each plan with its reference, in the order given within each world size.

    Workers are launched under `folder` for at most `MOST_CASES` of one world size. Each plan's
    `max_steps` steps are compared. `progress(what, done, total)` is called for every case.
    """
    references: dict[str, Trajectory] = {}
    done = 0
    for first, group in _launches(plans):
        rundir = _launch_of(folder, group[0].world_size, first)
        _train(group, rundir, progress=partial(_shift, progress, done, len(plans)))
        for index, plan in enumerate(group):
            key = _reference_key(plan)
            if key not in references:
                progress("reference", done + index, len(plans))
                references[key] = run_reference(plan, steps=plan.train.max_steps)
            found = load(case_of(folder, plan.world_size, first + index))
            yield _result(plan, references[key], found, tolerance)
        done += len(group)


def _launches(plans: Sequence[RunPlan]) -> Iterator[tuple[int, list[RunPlan]]]:
    """Yield the plans that one set of workers trains, with the number of the first of its size."""
    for _, of_size in groupby(sorted(plans, key=_world_size), key=_world_size):
        every = list(of_size)
        for first in range(0, len(every), MOST_CASES):
            yield first, every[first : first + MOST_CASES]


def _launch_of(folder: Path, world_size: int, first: int) -> RunDir:
    return RunDir(folder / f"world-{world_size}-from-{first}")


def case_of(folder: Path, world_size: int, index: int) -> RunDir:
    """The run directory of a case, the `index`-th of its world size."""
    first = index // MOST_CASES * MOST_CASES
    return case_in(_launch_of(folder, world_size, first), index - first)


def case_in(rundir: RunDir, index: int) -> RunDir:
    """The run directory of the `index`-th case of one set of workers."""
    return RunDir(rundir.cases / f"{index:04d}")


def _result(
    plan: RunPlan, reference: Trajectory, found: Trajectory, tolerance: Tolerance | None
) -> CaseResult:
    """Compare a case with the reference, and where it differs, step by step along its own way."""
    result = compare(plan, reference, found, tolerance)
    is_whole = all(
        len(getattr(found, kind)) == len(getattr(reference, kind))
        for kind in ("losses", "gradients", "parameters")
    )
    if result.passed or reference.not_exact or not is_whole:
        return result
    again = compare(plan, along(plan, reference, found), found, tolerance)
    return replace(result, difference=None) if again.passed else result


def _shift(progress: Progress, before: int, total: int, done: int) -> None:
    progress("training", before + done, total)


def _world_size(plan: RunPlan) -> int:
    return plan.world_size


def _train(plans: list[RunPlan], rundir: RunDir, *, progress: Callable[[int], None]) -> None:
    plans = [_without_copies(plan) for plan in plans]
    rundir.create()
    rundir.write_plan(plans[0])
    for index, plan in enumerate(plans):
        case = case_in(rundir, index)
        case.create()
        case.write_plan(plan)
    finished = 0

    def follow(events: list[Any]) -> tuple[()]:
        nonlocal finished
        finished += sum(event.kind == CaseDone.KIND and event.rank == 0 for event in events)
        progress(finished)
        return ()

    exit_code, cause = launch(
        plans[0],
        rundir,
        follow=follow,
        worker=WORKER,
        case_digests=[plan.digest for plan in plans],
    )
    if exit_code in STOPPED:
        raise KeyboardInterrupt
    if exit_code:
        trained, fix = plans[min(finished, len(plans) - 1)], f"its files are in {rundir.path}"
        where = f"{trained.plugin.name}, accumulation {trained.batch.accumulation_steps}"
        if num := len(trained.freeze.patterns):
            where += f", frozen by {num} pattern{'s' * (num > 1)}"
            fix = f"--freeze none leaves out what verify itself freezes; {fix}"
        raise WorkersFailed(f"the workers of the verification ended early ({where}): {cause}", fix)


def _without_copies(plan: RunPlan) -> RunPlan:
    """Return the plan without copies in the launcher's memory, which all cases would share."""
    return replace(plan, elastic=replace(plan.elastic, memory_copy=MemoryCopyPlan()))


def _reference_key(plan: RunPlan) -> str:
    """Key that is equal for plans that differ only in how the work is divided among ranks."""
    facts = (plan.model, plan.data, plan.batch.global_batch, plan.train, plan.optim, plan.freeze)
    return json.dumps(to_plain(facts), sort_keys=True)
