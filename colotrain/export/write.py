"""Exporting a checkpoint: to a Hugging Face directory, an adapter, or plain safetensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.state.checkpoint import step_of
from colotrain.errors import ColotrainError, UsageError
from colotrain.export import llama
from colotrain.export.adapter import write_peft
from colotrain.export.embedding import copy_modules
from colotrain.export.job import (
    OWN_CONFIG,
    Choice,
    Job,
    Progress,
    bare,
    call_of,
    dtype_name,
    note_dtype,
    write_json,
    write_weights,
)
from colotrain.export.prompting import GENERATION, complete_prompting
from colotrain.export.source import CheckpointTensors, choose
from colotrain.export.stream import Entry
from colotrain.export.tokenizer import copy_files, write_run_tokenizer
from colotrain.export.values import whole_entries
from colotrain.models import huggingface
from colotrain.models.huggingface_files import Converted
from colotrain.models.huggingface_match import sources_of
from colotrain.rundir import RunDir
from colotrain.spec.objectives import EmbedPlan
from colotrain.spec.plan import ModelPlan, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Summary of what an export wrote."""

    run: str
    step: int
    to: str
    format: str
    """hf, peft or safetensors."""
    tensors: int
    bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    rundir: RunDir, plan: RunPlan, to: Path, choice: Choice, *, progress: Progress
) -> Exported:
    """Write the model of a checkpoint of `rundir` to the new or empty directory `to`.

    `plan` is the run's, as it was checked: code that it names is called.

    One process writes one tensor at a time; the directory appears when it is complete. Raises
    `UsageError` for a directory that is not empty, a checkpoint that is absent or damaged, and a
    format that the model cannot be written in.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"--to {to}: is not empty", "give a new directory")
    checkpoint = choose(rundir, choice.step)
    form = _format(plan.model, choice)
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = to.absolute().with_name(f".{to.absolute().name}.tmp-{os.getpid()}")
    folder.mkdir()
    job = Job(
        plan=plan,
        stored=CheckpointTensors(checkpoint),
        choice=choice,
        format=form,
        folder=folder,
        progress=progress,
    )
    try:
        entries = WRITERS[form](job)
        files = tuple(sorted(path.name for path in folder.iterdir()))
        _publish(folder, to.absolute())
    except OSError as error:
        raise ColotrainError(f"--to {to}: {error}", "make room, or give another place") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Exported(
        run=str(rundir.path),
        step=step_of(checkpoint),
        to=str(to.absolute()),
        format=form,
        tensors=len(entries),
        bytes=sum(entry.num_bytes for entry in entries),
        files=files,
        notes=tuple(job.notes),
    )


def _format(model: ModelPlan, choice: Choice) -> str:
    if choice.adapter_only:
        if model.adapter is None:
            raise UsageError("--adapter: the run has no adapter", "leave it out")
        return "peft"
    known = (
        model.hf is not None or model.target == llama.TARGET or huggingface.is_plain(bare(model))
    )
    if choice.format == "hf" and not known:
        raise UsageError(
            f"--format hf: {model.key}={model.value} is no architecture of transformers",
            "use --format safetensors, and load the tensors into your own model by name",
        )
    return "safetensors" if choice.format == "safetensors" or not known else "hf"


def _publish(folder: Path, to: Path) -> None:
    """Rename the finished folder to `to`, and sync the rename to disk."""
    if to.exists():
        to.rmdir()
    folder.rename(to)
    handle = os.open(to.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_hf(job: Job) -> list[Entry]:
    is_own = job.plan.model.target == llama.TARGET
    return _write_llama(job) if is_own else _write_hf_directory(job)


def _write_hf_directory(job: Job) -> list[Entry]:
    """Write a model of transformers under its own names, with configuration and tokenizer."""
    plan, model = job.plan.model, bare(job.plan.model)
    source = plan.hf or directory_of(model)
    entries = write_weights(job, as_in_files(whole_entries(job), model))
    note_dtype(job, entries)
    settings = model.config.to_dict()  # type: ignore[operator,union-attr]
    settings.pop("auto_map", None)  # code is never exported
    settings.pop("torch_dtype", None)
    settings["architectures"] = [type(model).__name__]
    if job.untied:
        settings["tie_word_embeddings"] = False
    write_json(job.folder / "config.json", {**settings, "dtype": dtype_name(entries)})
    if source is not None:
        copy_files(Path(source), job.folder, (GENERATION,))
    if plan.hf is not None and isinstance(plan.objective, EmbedPlan):
        copy_modules(Path(plan.hf), job.folder)
    write_run_tokenizer(job, source=source)
    complete_prompting(job, settings)
    return entries


def directory_of(model: Any) -> str | None:
    """The directory that the user's code loaded a model of transformers from; None: unknown."""
    name = str(getattr(model.config, "name_or_path", "") or "")
    return name if name and Path(name).is_dir() else None


def _write_llama(job: Job) -> list[Entry]:
    model = bare(job.plan.model)
    entries = [replace(e, name=llama.llama_name(e.name)) for e in whole_entries(job)]
    entries = write_weights(job, entries)
    config = llama.llama_config(
        model,  # type: ignore[arg-type]
        seq_len=job.plan.data.seq_len,
        dtype=dtype_name(entries),
        end=write_run_tokenizer(job, source=None),
    )
    write_json(job.folder / "config.json", config)
    complete_prompting(job, config)
    return entries


def _write_plain(job: Job) -> list[Entry]:
    """Write safetensors under the names of `named_parameters()`, and a JSON file about them."""
    entries = write_weights(job, whole_entries(job))
    note_dtype(job, entries)
    model = job.plan.model
    about = {
        "schema": 1,
        "format": "colotrain",
        "model": call_of(model),
        "step": step_of(job.stored.folder),
        "dtype": dtype_name(entries),
    }
    write_json(job.folder / OWN_CONFIG, about)
    job.notes.append(
        "transformers does not know this model: load the tensors into it by name"
        if model.hf is None
        else "tensors only: --format hf writes a directory that transformers loads"
    )
    return entries


WRITERS: dict[str, Callable[[Job], list[Entry]]] = {
    "hf": _write_hf,
    "safetensors": _write_plain,
    "peft": write_peft,
}


@dataclass(slots=True)
class _Latest:
    """The parts of the parameters that were read last; those of others are not kept."""

    names: tuple[str, ...] = ()
    parts: dict[str, Tensor] = field(default_factory=dict)

    def read(self, entries: Sequence[Entry], part: str, model: nn.Module) -> Tensor:
        names = tuple(entry.name for entry in entries)
        if names != self.names:
            self.parts = {}
            tensors = {entry.name: entry.read() for entry in entries}
            self.names, self.parts = names, huggingface.as_stored(model, tensors)
        return self.parts[part].contiguous()


def as_in_files(entries: Sequence[Entry], model: nn.Module) -> list[Entry]:
    """Entries of the model's parameters as those of its directory's tensors.

    The parts of a parameter follow one another, so that it is read once.
    """
    if not huggingface.has_other_files(model):
        return list(entries)
    latest = _Latest()
    return [part for group in _groups(entries, model) for part in _parts(group, model, latest)]


def _groups(entries: Sequence[Entry], model: nn.Module) -> Iterator[list[Entry]]:
    """Entries that are converted together: all, where the user's code made the model."""
    if not huggingface.is_from_directory(model):
        yield list(entries)
        return
    found = sources_of(model).found
    groups: dict[int, list[Entry]] = {}
    for number, entry in enumerate(entries):
        source = found.get(entry.name)
        key = id(source.conversion) if isinstance(source, Converted) else -number - 1
        groups.setdefault(key, []).append(entry)
    yield from groups.values()


def _parts(group: list[Entry], model: nn.Module, latest: _Latest) -> Iterator[Entry]:
    like = {entry.name: torch.empty(entry.shape, device="meta") for entry in group}
    dtype = group[0].dtype
    for name, tensor in huggingface.as_stored(model, like).items():
        yield Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            read=_reader(group, name, model, latest),
        )


def _reader(
    group: list[Entry], name: str, model: nn.Module, latest: _Latest
) -> Callable[[], Tensor]:
    return lambda: latest.read(group, name, model)
