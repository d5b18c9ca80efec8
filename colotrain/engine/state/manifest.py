"""The manifest of a checkpoint: its description, and every file with its size and checksum.

It is written last and has a checksum of its own. It alone tells whether a checkpoint is complete
and intact. This module does not need torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import xxhash

from colotrain.errors import NO_RESOURCES, ColotrainError, ConfigError, Problem
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir, read_json, write_atomically
from colotrain.spec.plan import RunPlan, TrainPlan

MANIFEST = "manifest.json"
SCHEMA = 3
SEAL = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and checksum of a file as it was written."""

    bytes: int
    xxh128: str
    """Checksum of the file: 128-bit XXH3 in hexadecimal, as `xxh128sum` prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluations so far, as far as later ones depend on them."""

    last_step: int | None = None
    """Step after which the last one was made; -1: there was none; None: unknown."""
    improved_step: int | None = None
    """Step of the last one that improved (`train.stop_early`), whose value is in `best`."""
    best: float | None = None
    waited: int = 0
    """Number of evaluations since that one."""


@dataclass(slots=True, kw_only=True)
class History:
    """What happened in the steps so far, as far as later ones depend on it."""

    micro_batches: int = 0
    skipped_batches: int = 0
    """Global batches that rollbacks skipped."""
    rollbacks: int = 0
    best: tuple[int, float] | None = None
    """Step and value of the best evaluation so far, where its checkpoint is to be kept."""
    evaluations: Evaluations = field(default_factory=lambda: Evaluations(last_step=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, beside its tensors."""

    schema: int = SCHEMA
    step: int
    optimizer_steps: int
    micro_batches: int
    loss_scale: float | None
    """Loss scale of fp16; None in other precisions."""
    clean_steps: int
    world_size: int
    plugin: str
    global_batch: int
    skipped_batches: int = 0
    """Global batches that rollbacks skipped: step k reads batch k + this number."""
    rollbacks: int = 0
    best_step: int | None = None
    """Step of the best evaluation so far (`checkpoint.best`), whose value is in `best_value`."""
    best_value: float | None = None
    evaluations: Evaluations = field(default_factory=lambda: Evaluations())
    frozen: dict[str, str] = field(default_factory=dict)
    """Parameters that do not train in the next step, and the patterns that froze them."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The run's plan, as plain data."""
    versions: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Parameters that are left out: they never trained and have the values the run began with."""
    began_with: dict[str, Any] = field(default_factory=dict)
    """Settings that decide the values of the parameters in `left_out`."""
    beneath: dict[str, Any] = field(default_factory=dict)
    """How weights were changed before adapters trained on them (`adapters.changes_beneath`)."""
    sources: dict[str, str] = field(default_factory=dict)
    """Identities of the data and models that the run read (`engine.state.sources`)."""
    written_at: float
    """Time in Unix seconds."""
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    plain = to_plain(manifest)
    write_atomically(folder / MANIFEST, json.dumps({**plain, SEAL: seal(plain)}, indent=1))


def seal(plain: dict[str, Any]) -> str:
    """Return the checksum of a manifest's content, whatever its layout."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; `ColotrainError` where it is missing, damaged or forged."""
    path = folder / MANIFEST
    try:
        plain = read_json(path)
        if not isinstance(plain, dict) or plain.pop(SEAL, None) != seal(plain):
            raise ValueError("its content is not what was written")
        if plain.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {plain.get('schema')!r}, not {SCHEMA}")
        manifest = from_plain(Manifest, plain)
    except (OSError, ValueError, ConfigError) as error:
        if isinstance(error, OSError) and error.errno in NO_RESOURCES:
            raise
        raise ColotrainError(f"{path}: {error}", "use another checkpoint") from error
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named and int(named[1]) != manifest.step:
        raise ColotrainError(f"{path}: is that of step {manifest.step}", "use another checkpoint")
    return manifest


def damage(folder: Path, *, part: int = 0, parts: int = 1, read_all: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, or None.

    Every `parts`-th file from `part` on is checked. Without `read_all` only sizes are compared.
    """
    try:
        files = read_manifest(folder).files
        return next(_damages(folder, files, part, parts, read_all), None)
    except ColotrainError as error:
        return error.problem
    except OSError as error:
        if error.errno in NO_RESOURCES:  # the checkpoint may be whole: no older one takes its place
            raise
        return f"{folder}: {error}"


def _damages(
    folder: Path, files: dict[str, FileEntry], part: int, parts: int, read_all: bool
) -> Iterator[str]:
    for name, entry in sorted(files.items())[part::parts]:
        path = folder / Path(name).name
        if path.name != name or not path.is_file():
            yield f"{folder / name}: missing"
        elif path.stat().st_size != entry.bytes:
            yield f"{path}: {path.stat().st_size} bytes instead of {entry.bytes}"
        elif read_all and checksum(path) != entry.xxh128:
            yield f"{path}: its content is not what was written"
    if part == 0:
        extra = sorted(f.name for f in folder.iterdir() if f.name not in files)
        yield from (f"{folder / name}: not part of it" for name in extra if name != MANIFEST)


def checksum(path: Path) -> str:
    """Return the checksum of a file's content, which protects from accidents only, but is fast."""
    with path.open("rb") as file:
        return checksum_of(file)


def checksum_of(file: BufferedReader) -> str:
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints under `folder` that were written to the end, newest first."""
    found = [path.parent for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(found, reverse=True)


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints under `folder`, newest first, or `folder` itself where it is one."""
    return [folder] if (folder / MANIFEST).is_file() else complete(folder)


def where_to_resume(plan: RunPlan, rundir: RunDir, *, own: bool = True) -> Path:
    """Return the folder of the run's own checkpoints or, without any, of those the plan names.

    `own`: whether checkpoints that the run has already count.
    """
    asked = plan.checkpoint.resume
    if asked in ("auto", "none") or (own and complete(rundir.checkpoints)):
        return rundir.checkpoints
    inside = Path(asked) / "checkpoints"
    return inside if inside.is_dir() else Path(asked)


def check_batch(manifest: Manifest, folder: Path, global_batch: int) -> None:
    """Raise `ConfigError` where a run's global batch differs from the checkpoint's."""
    if manifest.global_batch != global_batch:
        key, then = "train.global_batch", manifest.global_batch
        expected = f"{then}, as in {folder}: samples would be skipped or repeated"
        problem = Problem(key=key, value=global_batch, expected=expected, fix=f"set {key}={then}")
        raise ConfigError([problem])


def check_steps(manifest: Manifest, folder: Path, train: TrainPlan) -> None:
    """Raise `ConfigError` where a run is to have fewer steps than the checkpoint has done."""
    done, asked, epochs = manifest.step, train.max_steps, train.epochs
    if asked >= done:
        return
    key, value, fix = "train.max_steps", str(asked), f"set train.max_steps={done} or more"
    expected = f"at least {done}, the steps that {folder} has done"
    if epochs is not None:
        key, value, fix = "train.epochs", f"{epochs:g}", f"raise it, or {fix}"
        expected = f"at least the {done} steps that {folder} has done, not {asked}"
    raise ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])


def publish(temporary: Path, final: Path) -> None:
    """Rename the folder `temporary` to `final`, durably, in place of any older one."""
    sync(temporary)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tidy(folder: Path) -> None:
    """Restore what an interrupted `publish` moved away; delete remains of unfinished writes.

    Call it only while no process writes to `folder`.
    """
    for old in folder.glob(".step-*.old"):
        final = folder / old.name.removeprefix(".").removesuffix(".old")
        if not (final / MANIFEST).is_file() and (old / MANIFEST).is_file():
            shutil.rmtree(final, ignore_errors=True)
            old.rename(final)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, *, keep: int, newest: Path, best: int | None = None) -> None:
    """Keep `newest`, the `keep` - 1 before it, and the one of step `best`; delete the rest.

    `newest` was just written and is good. Any of a later step was found damaged when the run
    resumed.
    """
    known = complete(folder)
    names = [path.name for path in known]
    kept = names_to_keep(names, keep=keep, newest=newest.name, best=best)
    for path in known:
        if path.name in kept:
            continue
        grave = path.with_name(f".{path.name}.gone")
        shutil.rmtree(grave, ignore_errors=True)
        path.rename(grave)  # an interrupted deletion leaves no half of a checkpoint
        shutil.rmtree(grave, ignore_errors=True)


def names_to_keep(
    names: Sequence[str], *, keep: int, newest: str, best: int | None = None
) -> set[str]:
    """Return which of the checkpoints, given newest first, `prune` keeps."""
    kept = set(names[names.index(newest) :][: max(keep, 1)])
    return kept | ({f"step-{best:08d}"} & set(names) if best is not None else set())
