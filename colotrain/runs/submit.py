"""`colotrain submit`: resolve, render the job's script, test it, submit it. Never waits for it."""

from __future__ import annotations

import getpass
import io
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from colotrain.errors import UsageError
from colotrain.records import to_plain
from colotrain.rundir import RUNS, RunDir
from colotrain.runs import checkpoints, trust
from colotrain.runs.naming import check_job, check_name
from colotrain.runs.resolving import ResolvedConfig, check_fits, print_notes, resolve_config
from colotrain.runs.sweep import Element, elements_of, of_each, write_sweep
from colotrain.schedulers.commands import NotInstalled
from colotrain.schedulers.job import Job, Submitted
from colotrain.schedulers.registry import remember, scheduler_or_default
from colotrain.show.console import print_json
from colotrain.spec.objectives import DistillPlan
from colotrain.spec.plan import RunPlan
from colotrain.spec.schedulers import DEFAULT


def submit(
    overrides: list[str],
    *,
    as_json: bool = False,
    dry_run: bool = False,
    test_only: bool = False,
    force: bool = False,
    smoke: bool = False,
    overwrite: bool = False,
) -> int:
    """Submit one run as one job; with `dry_run`, print its script and leave no files."""
    resolved = resolve_job(overrides, smoke=smoke)
    print_notes(resolved, warnings=True)
    name = resolved.plan.name
    rundir = RunDir(RUNS / name)
    check_run(rundir, resolved, force=force, overwrite=overwrite)
    job = job_of([rundir], resolved, name=name, logs=rundir.logs)
    if dry_run or test_only:
        return report_script(job, resolved, {"run": name}, dry_run=dry_run, as_json=as_json)
    try:
        said, number = send(job, {rundir: resolved}, rundir, overwrite=overwrite)
    except NotInstalled as error:
        report_script(job, resolved, {"run": name}, dry_run=True, as_json=as_json)
        problem = f"{error.problem}: nothing is submitted, the job is printed"
        raise UsageError(problem, error.fix) from error
    document = {
        "run": name,
        "run_dir": str(rundir.path),
        "job": number,
        "script": str(script_file(rundir, resolved)),
        "test": said,
    }
    text = f"{name}: job {number}; `colotrain runs`, `colotrain logs {name} -f`"
    return report(document, text, as_json=as_json)


def submit_sweep(
    overrides: list[str],
    *,
    as_json: bool = False,
    dry_run: bool = False,
    test_only: bool = False,
    force: bool = False,
    max_parallel: int | None = None,
    overwrite: bool = False,
) -> int:
    """Submit a job array, with a run for every combination of comma-separated values."""
    elements = elements_of(overrides)
    configs = of_each(elements, lambda element: resolve_job(element.overrides))
    scheduler = scheduler_or_default(configs[0].config)
    if not scheduler.has_arrays:
        problem = f"--sweep: {scheduler.label} has no job arrays"
        raise UsageError(problem, "submit the runs one by one")
    plans = [resolved.plan for resolved in configs]
    if len({(plan.cluster.nodes, plan.elastic.launchers) for plan in plans}) > 1:
        raise UsageError("--sweep: an array has one number of nodes", "sweep over something else")
    check_one_section(configs)
    print_notes(*configs, warnings=True)
    runs = {RunDir(RUNS / resolved.plan.name): resolved for resolved in configs}
    made = dict(zip([element.run for element in elements], runs.items(), strict=True))
    of_each(
        elements,
        lambda element: check_run(*made[element.run], force=force, overwrite=overwrite),
    )
    folder, first = RunDir(RUNS / elements[0].sweep), configs[0]
    job = job_of(runs, first, name=folder.name, logs=folder.logs)
    job = replace(job, is_array=True, max_parallel=max_parallel)
    if dry_run or test_only:
        about = {"sweep": folder.name}
        return report_script(job, first, about, dry_run=dry_run, as_json=as_json)
    said, number = send(job, runs, folder, elements, overwrite=overwrite)
    document = {
        "sweep": folder.name,
        "job": number,
        "script": str(script_file(folder, first)),
        "runs": [{"run": element.run, "chosen": element.chosen} for element in elements],
        "test": said,
    }
    text = f"{folder.name}: job {number}, {len(elements)} runs; `colotrain runs --sweep "
    return report(document, f"{text}{folder.name}`", as_json=as_json)


def report_script(
    job: Job, resolved: ResolvedConfig, about: dict[str, str], *, dry_run: bool, as_json: bool
) -> int:
    """Print the job's script, or else what the scheduler says about it."""
    scheduler = scheduler_or_default(resolved.config)
    settings = scheduler.section(resolved.config)
    script = scheduler.render(job, settings)
    if dry_run:
        text = script.removesuffix("\n")
        return report({**about, "script_text": script}, text, as_json=as_json)
    said = scheduler.commands.test(script, settings)
    return report({"test": said, **about}, said, as_json=as_json)


def send(
    job: Job,
    runs: dict[RunDir, ResolvedConfig],
    folder: RunDir,
    elements: list[Element] | None = None,
    *,
    overwrite: bool,
) -> tuple[str, str]:
    """Test the job, write its runs and its script in `folder`, and submit it.

    Returns what the scheduler says about it and its id. `elements` are those of a sweep.
    """
    config = next(iter(runs.values())).config
    scheduler = scheduler_or_default(config)
    settings = scheduler.section(config)
    script = scheduler.render(job, settings)
    said = scheduler.commands.test(script, settings)
    for rundir, resolved in runs.items():
        check_job(rundir)
        check_name(rundir, resolved.plan, resolved.config, overwrite=overwrite)
    for rundir, resolved in runs.items():
        write_run(rundir, resolved.plan, resolved.config)
    folder.create()
    if not scheduler.is_elsewhere and settings.snapshot:
        key = f"cluster.{scheduler.name}.snapshot"
        script = scheduler.render(_with_code(job, folder, key=key), settings)
    file = folder.job_script(scheduler.ending)
    folder.write(file, script)
    if elements:
        write_sweep(folder, elements)
    number = scheduler.commands.submit(str(file), settings)
    known = Submitted(
        job=number, script=str(file), scheduler=scheduler.name, settings=to_plain(settings)
    )
    for index, rundir in enumerate(runs):
        its = replace(known, job=f"{number}_{index}", sweep=folder.name) if elements else known
        remember(rundir, its)
    return said, number


def check_run(rundir: RunDir, resolved: ResolvedConfig, *, force: bool, overwrite: bool) -> None:
    """Refuse a run that does not fit in memory, or whose folder has other checkpoints."""
    if not force:
        check_fits(resolved)
    checkpoints.check_named(resolved.plan, rundir, overwrite=overwrite)


def check_one_section(configs: list[ResolvedConfig]) -> None:
    """Refuse a sweep over the scheduler's settings: an array is one script for all its runs."""
    scheduler = scheduler_or_default(configs[0].config)
    asked = [to_plain(scheduler.section(resolved.config)) for resolved in configs]
    for name, first in asked[0].items():
        if any(other[name] != first for other in asked):
            key = f"cluster.{scheduler.name}.{name}"
            problem = f"--sweep: {key} is one and the same in all runs of an array"
            raise UsageError(problem, "sweep over something else, or submit several times")


def resolve_job(overrides: list[str], *, smoke: bool = False) -> ResolvedConfig:
    """Return a plan for the nodes of the cluster, independent of this machine."""
    resolved = resolve_config(overrides, here=False, job=True, smoke=smoke)
    scheduler = scheduler_or_default(resolved.config)
    if not scheduler.is_elsewhere:
        return resolved
    volumes = scheduler.section(resolved.config).volumes.values()
    found = _paths_outside(resolved.plan, tuple(volumes))
    plan = replace(resolved.plan, warnings=(*resolved.plan.warnings, *found))
    return replace(resolved, plan=plan)


def _paths_outside(plan: RunPlan, volumes: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning of each path that the plan reads and that is in none of the job's volumes."""
    parts = [("data.mixture", path) for part in plan.data.mixture for path in part.paths]
    paths = [*(("data.path", path) for path in plan.data.paths), *parts]
    paths += [("model.hf", plan.model.hf)] if plan.model.hf else []
    if isinstance(plan.model.objective, DistillPlan):
        paths += [("train.distill.teacher", plan.model.objective.teacher)]
    if plan.checkpoint.resume not in ("auto", "none"):
        paths += [("checkpoint.resume", plan.checkpoint.resume)]
    for key, path in paths:
        if not any(Path(path).is_relative_to(volume) for volume in volumes):
            yield f"{key}={path}: is in none of the job's volumes, so the image must have it there"


def job_of(runs: Iterable[RunDir], resolved: ResolvedConfig, *, name: str, logs: Path) -> Job:
    scheduler = scheduler_or_default(resolved.config)
    settings, known = scheduler.section(resolved.config), list(runs)
    job = Job(
        name=name,
        nodes=resolved.plan.cluster.nodes + resolved.plan.elastic.spare_nodes,
        runs=tuple(str(rundir.path) for rundir in known),
        logs=str(logs),
        cwd=str(Path.cwd()),
        python=settings.python or sys.executable,
    )
    if not scheduler.is_elsewhere:
        return job
    texts = trust.texts_of(resolved.plan, known[0], resolved.config)
    return replace(
        job,
        runs=(f"{settings.runs_dir.rstrip('/')}/{known[0].name}",),
        python=settings.python or "python",
        owner=f"{getpass.getuser()}@{socket.gethostname()}",
        files={str(path): text for path, text in texts.items()},
    )


def script_file(folder: RunDir, resolved: ResolvedConfig) -> Path:
    return folder.job_script(scheduler_or_default(resolved.config).ending)


def _with_code(job: Job, rundir: RunDir, *, key: str) -> Job:
    """Return the job with a copy of the working tree as its working directory."""
    number = len(list(rundir.path.glob(f"{rundir.code.name}*")))
    target = rundir.code if number == 0 else rundir.code.with_name(f"{rundir.code.name}-{number}")
    return replace(job, cwd=str(copy_tracked_files(Path.cwd(), target, key=key)))


def write_run(rundir: RunDir, plan: RunPlan, config: dict[str, Any]) -> None:
    """Write the run directory for the job's nodes."""
    rundir.create()
    trust.write_signed(plan, rundir, config)
    for stale in (rundir.cancel_file, rundir.finished_file, rundir.stop_file):
        stale.unlink(missing_ok=True)


def report(document: dict[str, Any], text: str, *, as_json: bool) -> int:
    """Print the document as JSON, or else `text`."""
    if as_json:
        print_json(document)
    else:
        print(text)
    return 0


TIMEOUT_S = 120.0


def copy_tracked_files(
    cwd: Path, target: Path, *, key: str = f"cluster.{DEFAULT}.snapshot"
) -> Path:
    """Copy the files that git tracks around `cwd` to `target`; return the path of `cwd` in it.

    `key` is the setting that asks for it, for messages.

    Uncommitted changes are included, untracked files are not. The repository itself is unchanged.
    """
    top = Path(_git(cwd, "rev-parse", "--show-toplevel", key=key).decode().strip())
    changed = _git(cwd, "stash", "create", key=key).decode().strip()
    archive = _git(top, "archive", "--format=tar", changed or "HEAD", key=key)
    target.mkdir(mode=0o700, parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")
    return target / cwd.resolve().relative_to(top.resolve())


def _git(cwd: Path, *words: str, key: str) -> bytes:
    fix = f"submit from a git repository with a commit, or set {key}=false"
    try:
        return subprocess.run(
            ["git", "-C", str(cwd), *words], capture_output=True, check=True, timeout=TIMEOUT_S
        ).stdout
    except FileNotFoundError as error:
        raise UsageError(f"{key}=true: git is not installed", fix) from error
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()
        problem = f"{key}=true: no copy of {cwd} ({said or error})"
        raise UsageError(problem, fix) from error
