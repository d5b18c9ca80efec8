"""The receipt of an export: identities of its files, and of the code that it came from."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from colotrain.errors import Problem, UsageError, fix_of, shortened
from colotrain.export.job import OWN_CONFIG, call_of
from colotrain.models.adapters import SETTINGS
from colotrain.records import read
from colotrain.rundir import open_inside, read_json
from colotrain.spec.plan import RunPlan

RECEIPT = "receipt.json"
READ = {
    "format": str,
    "notes": list[str],
    "base_quantized": dict[str, str] | None,
    "run.path": str,
    "run.step": int,
    "files": dict[str, str],
    "tokenizer": dict[str, str | None],
    "probe.input_ids": list[list[int]],
    "probe.logits": list[list[float]],
    "validation_loss.run": float | None,
    "validation_loss.export": float | None,
    "outputs.kind": str | None,
    "outputs.samples": int | None,
    "outputs.largest_difference": float | None,
}
"""Dotted key → type of what is read of a receipt, which anybody may have written."""


def read_receipt(folder: Path) -> dict[str, Any]:
    """Return the receipt in an exported directory; `UsageError` where it is none."""
    problems: list[Problem] = []
    try:
        found: dict[str, Any] = read_json(folder / RECEIPT)
        for key, wanted in READ.items():
            section, _, name = key.rpartition(".")
            value = (found[section] if section else found).get(name)
            read(wanted, value, key=key, problems=problems)
        if problems:
            raise ValueError(str(problems[0]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{folder}: has no {RECEIPT} that can be read ({error})"
        fix = fix_of(error, "name the run, and the directory with --to")
        raise UsageError(problem, fix) from error
    return found


def exported_files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file as a check that passed found it first; empty where there was none."""
    return dict(read_receipt(folder)["files"]) if (folder / RECEIPT).is_file() else {}


def changed_files(folder: Path, *, alone: bool = False) -> list[str]:
    """What is wrong with the files, by the receipt of an earlier check that passed.

    Raises `UsageError` for what it does not list: the libraries that read the directory may load
    that. Names that begin with a dot are no files of a model. `alone`: there is no run to ask, so
    such a receipt is needed.
    """
    check_regular(folder)
    then, now = exported_files(folder), digests(folder)
    names = {name for name in _names_in(folder) if not name.startswith(".")}
    if added := sorted(names - {RECEIPT, *then}) if then or alone else []:
        problem = f"{folder}: {RECEIPT} does not list {shortened(', '.join(added))}"
        fix = "take that out, or export the run again"
        raise UsageError(problem, fix if then else "check it with its run: no check has passed")
    return [
        f"{name} {'is missing' if name not in now else 'is not the file that was exported'}"
        for name, digest in then.items()
        if now.get(name) != digest
    ]


def check_regular(folder: Path) -> None:
    """Raise `UsageError` for a directory with a FIFO or a device: libraries would wait for it."""
    try:
        strange = [p.name for p in sorted(folder.iterdir()) if not (p.is_file() or p.is_dir())]
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "name a model's directory") from error
    if strange:
        problem = f"{folder}: {shortened(', '.join(strange))}: expected regular files"
        raise UsageError(problem, "take that out")


def named_base(folder: Path) -> str:
    """Path of the base model that the settings of an adapter name; empty where they name none."""
    try:
        return str(read_json(folder / SETTINGS)["base_model_name_or_path"] or "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def changed_call(folder: Path, plan: RunPlan, kind: str) -> list[str]:
    """What is wrong with what a directory says about its base, or a model of the user's own."""
    if kind == "peft":
        is_same = named_base(folder) == plan.model.hf
        return [] if is_same else [f"{SETTINGS} does not name the base of the run"]
    try:
        about = read_json(folder / OWN_CONFIG) if kind == "own" else None
        is_same = about is None or about["model"] == call_of(plan.model)
    except (OSError, ValueError, KeyError, TypeError):
        is_same = False
    return [] if is_same else [f"{OWN_CONFIG} does not name the model of the run"]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the receipt."""
    found = {}
    for name in _names_in(folder):
        path = folder / name
        if path.is_file() and name != RECEIPT:
            try:
                with open(path, "rb", opener=partial(open_inside, folder)) as file:
                    found[name] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                fix = "copy the directory with what its links lead to"
                raise UsageError(f"{path}: {error.strerror}", fix) from error
    return found


def _names_in(folder: Path) -> list[str]:
    """Names of files and folders; a folder with files, such as a pooling's, has theirs."""
    found = []
    for path in sorted(folder.iterdir()):
        inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
        found += [f"{path.name}/{inner.name}" for inner in inside] or [path.name]
    return found


def code_of(plan: RunPlan) -> dict[str, Any]:
    """Identity of the code: colotrain's version, the plan, and files of the user's functions."""
    named = (plan.model.target, plan.model.loss, plan.data.target, plan.data.collate)
    files = {}
    for dotted in filter(None, named):
        spec = importlib.util.find_spec(dotted.partition(":")[0])
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            files[dotted] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    version = metadata.version("colotrain")
    return {"colotrain": version, "plan_sha256": plan.digest, "functions_sha256": files}
