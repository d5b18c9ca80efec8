"""`colotrain checkpoints`: lists a run's checkpoints and whether they are intact."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from colotrain.config.stores import is_address
from colotrain.engine.state.manifest import (
    MANIFEST,
    Manifest,
    candidates,
    check_batch,
    check_steps,
    complete,
    damage,
    read_manifest,
    where_to_resume,
)
from colotrain.errors import ColotrainError, UsageError
from colotrain.events.liveness import find
from colotrain.records import to_plain
from colotrain.rundir import RUNS, RunDir
from colotrain.runs.fetching import stored_checkpoints
from colotrain.show.console import print_json, stdout_console
from colotrain.show.formatting import clean
from colotrain.show.terminal import is_live
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration, short_size

WITHOUT_TERMINAL = 1000  # columns
SUPERSEDED = "superseded"
"""Prefix of folders with checkpoints that were set aside when the run resumed an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint; fields that its manifest does not tell are None."""

    name: str
    state: str
    """intact (every byte was read), complete (every file is there, of its size), or damaged."""
    problem: str | None
    step: int | None = None
    bytes: int | None = None
    age_s: float | None = None
    plugin: str | None = None
    world_size: int | None = None
    best: bool = False
    """Whether it belongs to the run's best evaluation (`checkpoint.best`)."""
    path: str


def list_checkpoints(name: str | None, *, as_json: bool, verify: bool, root: Path = RUNS) -> int:
    """Print a run's checkpoints, newest first; return 1 if one of them is damaged, else 0."""
    if name is not None and is_address(name):
        run, found = name, stored_checkpoints(name, whole=verify)
    else:
        rundir = find(name, root=root)
        rundir.check_files()
        run, found = rundir.name, iter(folders(rundir))
    rows, best = list[Row](), None
    for folder in found:
        rows.append(row_of(folder, verify=verify))
        if best is None:  # the newest readable checkpoint knows it
            with suppress(ColotrainError):
                best = read_manifest(folder).best_step
    rows = [replace(row, best=row.step is not None and row.step == best) for row in rows]
    if name is not None and is_address(name):
        rows = [replace(row, path=f"{name}/checkpoints/{row.name}") for row in rows]
    if as_json:
        print_json(to_plain(rows))
    elif rows:
        print_table(rows)
    else:
        print(f"{run}: no checkpoints")
    return 1 if any(row.state == "damaged" for row in rows) else 0


def folders(rundir: RunDir) -> list[Path]:
    return sorted(rundir.checkpoints.glob("step-*"), reverse=True)


def check_resumable(plan: RunPlan, rundir: RunDir) -> None:
    """Raise the `ConfigError` with which the ranks would refuse to resume what is saved."""
    _check(plan, where_to_resume(plan, rundir))


def check_named(plan: RunPlan, rundir: RunDir, *, overwrite: bool) -> None:
    """Do the same for `checkpoint.resume=PATH`, before an older run of the name is looked at.

    `overwrite`: whether that run will be set aside, so that its own checkpoints do not count and
    PATH may not be among them.
    """
    asked = plan.checkpoint.resume
    if asked == "auto":
        return
    if overwrite and Path(asked).resolve().is_relative_to(rundir.path.resolve()):
        problem = f"checkpoint.resume={asked}: --overwrite renames {rundir.path}, which has it"
        raise UsageError(problem, "choose another name")
    found = _check(plan, where_to_resume(plan, rundir, own=not overwrite))
    if overwrite and asked != "none" and not found:
        problem = f"checkpoint.resume={asked}: holds no complete checkpoint"
        raise UsageError(problem, "give a run or a checkpoint folder that does")


def _check(plan: RunPlan, where: Path) -> bool:
    """Check the plan against the checkpoint to be resumed; return whether there is one."""
    for folder in candidates(where) if plan.checkpoint.resume != "none" else ():
        if damage(folder, read_all=False) is None:  # otherwise an older one is used
            _check_manifest(plan, read_manifest(folder), folder)
            return True
    return False


def _check_manifest(plan: RunPlan, manifest: Manifest, folder: Path) -> None:
    check_batch(manifest, folder, plan.batch.global_batch)
    check_steps(manifest, folder, plan.train)


def roll_back(rundir: RunDir, plan: RunPlan) -> str | None:
    """Set the checkpoints aside that are later than `checkpoint.resume`; say so, or return None.

    If that is not one of the run's own checkpoints, all of them are set aside. Raises `ConfigError`
    if the plan cannot resume from it. Call it only while no launcher has the run.
    """
    chosen = Path(plan.checkpoint.resume)
    if chosen == rundir.path:
        return None
    folder = chosen / RunDir(chosen).checkpoints.name
    known = complete(folder) if folder.is_dir() else [chosen]
    problem = damage(known[0]) if known else f"{folder}: holds no complete checkpoint"
    if problem is not None:
        raise UsageError(
            f"checkpoint.resume={chosen}: {problem}", "`colotrain checkpoints` shows which are good"
        )
    _check_manifest(plan, read_manifest(known[0]), known[0])
    own, later = chosen.resolve().parent == rundir.checkpoints.resolve(), folders(rundir)
    if own:
        later = [path for path in later if path.name > chosen.name]
    if not later:
        return None
    number = len(list(rundir.checkpoints.glob(f"{SUPERSEDED}-*"))) + 1
    aside = rundir.checkpoints / f"{SUPERSEDED}-{number}"
    rundir.make_folder(aside)
    for path in later:
        path.rename(aside / path.name)
    names = ", ".join(path.name for path in reversed(later))
    return f"{rundir.name} goes back to {chosen}; {names}: kept in {aside}"


def row_of(folder: Path, *, verify: bool) -> Row:
    """Return the row of one checkpoint, however damaged it is."""
    try:
        manifest = read_manifest(folder)
    except ColotrainError as error:
        missing = not (folder / MANIFEST).exists()
        what = f"{folder / MANIFEST}: missing" if missing else error.problem
        return Row(name=folder.name, state="damaged", problem=what, path=str(folder))
    problem = damage(folder, read_all=verify)
    state = "damaged" if problem else "intact" if verify else "complete"
    return Row(
        name=folder.name,
        state=state,
        problem=problem,
        step=manifest.step,
        bytes=manifest.num_bytes,
        age_s=time.time() - manifest.written_at,
        plugin=manifest.plugin,
        world_size=manifest.world_size,
        path=str(folder),
    )


def print_table(rows: list[Row]) -> None:
    console = stdout_console()
    if not is_live(console):
        console.width = WITHOUT_TERMINAL
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("STEP", "SIZE", "AGE", "WORLD"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("PLUGIN", "STATE"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def cells(row: Row) -> list[Text]:
    style = "red" if row.state == "damaged" else "green"
    state = Text(row.state, style=style)
    if row.best:
        state.append(", best")
    if row.problem:
        state.append(clean(f": {row.problem}"))
    return [
        Text(clean(row.name.removeprefix("step-").lstrip("0") or "0")),
        Text("-" if row.bytes is None else short_size(row.bytes)),
        Text(short_duration(row.age_s)),
        Text("-" if row.world_size is None else str(row.world_size)),
        Text(clean(row.plugin or "-")),
        state,
    ]
