"""`colotrain submit`: resolve, render the job's script, test it, submit it. Never blocks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from colotrain.config.schema_cluster import Slurm
from colotrain.errors import UsageError
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RUNS, RunDir, write_atomically
from colotrain.runs import checkpoints, trust
from colotrain.runs.naming import check_job, check_name
from colotrain.runs.resolving import ResolvedConfig, check_fits, print_notes, resolve_config
from colotrain.runs.sweep import Element, elements_of, named, write_sweep
from colotrain.schedulers import queue
from colotrain.schedulers.slurm import Job, render
from colotrain.show.console import print_json
from colotrain.spec.plan import RunPlan


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
    if not force:
        check_fits(resolved)
    plan = resolved.plan
    rundir = RunDir(RUNS / plan.name)
    checkpoints.check_named(plan, rundir, overwrite=overwrite)
    slurm = section(resolved.config)
    job = job_of([rundir], plan, slurm, name=plan.name, logs=rundir.logs, cwd=Path.cwd())
    script = render(job, slurm)
    if dry_run:
        text = script.removesuffix("\n")
        return report({"run": plan.name, "script_text": script}, text, as_json=as_json)
    said = queue.test(script)
    if test_only:
        return report({"test": said, "run": plan.name}, said, as_json=as_json)
    check_free(rundir, resolved, overwrite=overwrite)
    write_run(rundir, plan, resolved.config)
    if slurm.snapshot:
        script = render(_with_code(job, rundir), slurm)
    write_atomically(rundir.script_file, script)
    number = queue.submit(str(rundir.script_file))
    queue.remember(rundir, queue.Submitted(job=number, script=str(rundir.script_file)))
    document = {
        "run": plan.name,
        "run_dir": str(rundir.path),
        "job": number,
        "script": str(rundir.script_file),
        "test": said,
    }
    text = f"{plan.name}: job {number}; `colotrain runs`, `colotrain logs {plan.name} -f`"
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
    configs = []
    for element in elements:
        with named(element):
            configs.append(resolve_job(element.overrides))
    plans = [resolved.plan for resolved in configs]
    if len({(plan.cluster.nodes, plan.elastic.max_nodes) for plan in plans}) > 1:
        raise UsageError("--sweep: an array has one number of nodes", "sweep over something else")
    check_one_section(configs)
    print_notes(*configs, warnings=True)
    rundirs = [RunDir(RUNS / plan.name) for plan in plans]
    for element, resolved, rundir in zip(elements, configs, rundirs, strict=True):
        with named(element):
            if not force:
                check_fits(resolved)
            checkpoints.check_named(resolved.plan, rundir, overwrite=overwrite)
    folder, slurm = RunDir(RUNS / elements[0].sweep), section(configs[0].config)
    cwd = Path.cwd()
    job = job_of(rundirs, plans[0], slurm, name=folder.name, logs=folder.logs, cwd=cwd)
    job = _as_array(job, max_parallel)
    script = render(job, slurm)
    if dry_run:
        text = script.removesuffix("\n")
        return report({"sweep": folder.name, "script_text": script}, text, as_json=as_json)
    said = queue.test(script)
    if test_only:
        return report({"test": said, "sweep": folder.name}, said, as_json=as_json)
    for rundir, resolved in zip(rundirs, configs, strict=True):
        check_free(rundir, resolved, overwrite=overwrite)
    for rundir, resolved in zip(rundirs, configs, strict=True):
        write_run(rundir, resolved.plan, resolved.config)
    folder.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    if slurm.snapshot:
        script = render(_with_code(job, folder), slurm)
    write_atomically(folder.script_file, script)
    write_sweep(folder, elements)
    number = queue.submit(str(folder.script_file))
    for index, rundir in enumerate(rundirs):
        submitted = queue.Submitted(
            job=f"{number}_{index}", script=str(folder.script_file), sweep=folder.name
        )
        queue.remember(rundir, submitted)
    document = {
        "sweep": folder.name,
        "job": number,
        "script": str(folder.script_file),
        "runs": [_element(element) for element in elements],
        "test": said,
    }
    text = f"{folder.name}: job {number}, {len(elements)} runs; `colotrain runs --sweep "
    return report(document, f"{text}{folder.name}`", as_json=as_json)


def check_one_section(configs: list[ResolvedConfig]) -> None:
    """Refuse a sweep over `cluster.slurm`: an array is one script for all its runs."""
    asked = [to_plain(section(resolved.config)) for resolved in configs]
    for name, first in asked[0].items():
        if any(other[name] != first for other in asked):
            problem = f"--sweep: cluster.slurm.{name} is one and the same in all runs of an array"
            raise UsageError(problem, "sweep over something else, or submit several times")


def _element(element: Element) -> dict[str, Any]:
    return {"run": element.run, "chosen": element.chosen}


def resolve_job(overrides: list[str], *, smoke: bool = False) -> ResolvedConfig:
    """Return a plan for the nodes of the cluster, independent of this machine."""
    return resolve_config(overrides, here=False, job=True, smoke=smoke)


def section(config: dict[str, Any]) -> Slurm:
    return from_plain(Slurm, config["cluster"]["slurm"])


def job_of(
    rundirs: list[RunDir], plan: RunPlan, slurm: Slurm, *, name: str, logs: Path, cwd: Path
) -> Job:
    return Job(
        name=name,
        nodes=plan.cluster.nodes,
        runs=tuple(str(rundir.path) for rundir in rundirs),
        logs=str(logs),
        cwd=str(cwd),
        python=slurm.python or sys.executable,
    )


def _as_array(job: Job, max_parallel: int | None) -> Job:
    from dataclasses import replace

    return replace(job, is_array=True, max_parallel=max_parallel)


def _with_code(job: Job, rundir: RunDir) -> Job:
    """Return the job with a copy of the working tree as its working directory."""
    from dataclasses import replace

    from colotrain.runs.snapshot import take

    number = len(list(rundir.path.glob(f"{rundir.code.name}*")))
    target = rundir.code if number == 0 else rundir.code.with_name(f"{rundir.code.name}-{number}")
    return replace(job, cwd=str(take(Path.cwd(), target)))


def check_free(rundir: RunDir, resolved: ResolvedConfig, *, overwrite: bool) -> None:
    """Refuse a run that another job has, or that was made with other settings."""
    check_job(rundir)
    check_name(rundir, resolved.plan, resolved.config, overwrite=overwrite)


def write_run(rundir: RunDir, plan: RunPlan, config: dict[str, Any]) -> None:
    """Write the run directory for the job's nodes."""
    rundir.create()
    os.chmod(rundir.path, 0o700)
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
