"""Whether the current folder is a place for the user's code, conf files and recipes.

A run's directory, a model's and an export's are not: they may come from somebody else. Standard
library only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain.rundir import RunDir, read_json

IN_PLANS = {"plugin", "model", "batch", "cluster"}
"""Keys that every plan has."""
IN_MODELS = {
    "config.json": {"model_type", "architectures"},
    "adapter_config.json": {"peft_type"},
    "colotrain.json": {"model"},
}
"""File of a model directory → keys of which it has one."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def places_of_code() -> list[str]:
    """Return the folder from which the user's modules are imported, if the current one is such."""
    return [] if holder_of(Path.cwd()) else [os.getcwd()]


def holder_of(folder: Path) -> str:
    """Return what holds a folder that is no place for the user's files; empty for all others.

    The copy of the working tree in a run (`RunDir.code`), from which its job runs, is such a place.
    """
    if run := run_around(folder):
        return f"{run} is a run directory ({mark_of_run(run)})"
    if mark := mark_of_model(folder):
        return f"{folder} is a model directory ({mark})"
    return ""


def run_around(folder: Path) -> Path | None:
    """Return the run directory that `folder` is, or is in; None if it is in none."""
    folder = folder.resolve()
    for outer in (folder, *folder.parents):
        inner = folder.relative_to(outer).parts
        if inner and inner[0].startswith(RunDir(outer).code.name):
            continue
        if mark_of_run(outer):
            return outer
    return None


def mark_of_run(folder: Path) -> str:
    """Return the files by which a folder is a run's: a plan, or two others that only runs have."""
    run = RunDir(folder)
    plan = _read(run.plan_file)
    if isinstance(plan, dict) and plan.keys() >= IN_PLANS:
        return "it has a plan.json"
    control = run.stop_file.parent
    known = (run.signature_file, run.launcher_file, run.launcher_events, control)
    marks = [str(path.relative_to(run.path)) for path in known if path.exists()]
    return f"it has {marks[0]} and {marks[1]}" if len(marks) > 1 else ""


def mark_of_model(folder: Path) -> str:
    """Return the files by which a folder is a model's: one that describes it, beside weights."""
    for name, keys in IN_MODELS.items():
        about = _read(folder / name)
        if isinstance(about, dict) and about.keys() & keys:
            # a survey depends on the folders that are listed: not on one that is no model's
            weights = (path.name for pattern in WEIGHTS for path in folder.glob(pattern))
            if file := next(weights, ""):
                return f"it has {name} and {file}"
    return ""


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return read_json(path)
    return None
