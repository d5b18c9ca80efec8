"""The receipt of an export: identities of its files, and of the code that it came from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from colotrain.errors import UsageError
from colotrain.export.job import OWN_CONFIG, call_of
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

RECEIPT = "receipt.json"


def read_receipt(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RECEIPT).read_text("utf-8"))
        _ = found["format"], found["probe"]["input_ids"], found["probe"]["logits"], found["notes"]
        _ = found["run"]["path"], int(found["run"]["step"]), found["validation_loss"].get("export")
        _ = found["outputs"]["largest_difference"], dict(found["files"]), dict(found["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder}: has no {RECEIPT} that can be read ({error})",
            "name the run, and the directory with --to",
        ) from error
    return found


def exported_files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file as a check that passed found it first; empty where there was none."""
    return dict(read_receipt(folder)["files"]) if (folder / RECEIPT).is_file() else {}


def changed_files(folder: Path) -> list[str]:
    """What is wrong with the files, by the receipt of an earlier check."""
    then, now = exported_files(folder), digests(folder)
    return [
        f"{name} {'is missing' if name not in now else 'is not the file that was exported'}"
        for name, digest in then.items()
        if now.get(name) != digest
    ]


def changed_call(folder: Path, plan: RunPlan, kind: str) -> list[str]:
    """What is wrong with what a directory says about a model of the user's own."""
    try:
        about = json.loads((folder / OWN_CONFIG).read_text("utf-8")) if kind == "own" else None
        is_same = about is None or about["model"] == call_of(plan.model)
    except (OSError, ValueError, KeyError, TypeError):
        is_same = False
    return [] if is_same else [f"{OWN_CONFIG} does not name the model of the run"]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the receipt."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != RECEIPT:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def code_of(rundir: RunDir, plan: RunPlan) -> dict[str, Any]:
    """Identity of the code: colotrain's version, the plan, and files of the user's functions."""
    named = (plan.model.target, plan.model.loss, plan.data.target, plan.data.collate)
    files = {}
    for dotted in filter(None, named):
        spec = importlib.util.find_spec(dotted.partition(":")[0])
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            files[dotted] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    plan_digest = hashlib.sha256(rundir.plan_file.read_bytes()).hexdigest()
    version = metadata.version("colotrain")
    return {"colotrain": version, "plan_sha256": plan_digest, "functions_sha256": files}
