"""Exporting a checkpoint: to a Hugging Face directory, an adapter, or plain safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.checkpoint.checkpoint import step_of
from colotrain.errors import ColotrainError, UsageError
from colotrain.export import llama
from colotrain.export.source import CheckpointTensors, choose
from colotrain.export.stored_layout import as_in_files
from colotrain.export.stream import Entry, write_file, write_files
from colotrain.export.tokenizer import copy_tokenizer, write_tokenizer
from colotrain.models import adapters, huggingface
from colotrain.models.huggingface_files import Source
from colotrain.models.loading import build_on_meta, build_whole
from colotrain.models.stored import StoredTensors, weight_files
from colotrain.rundir import RunDir
from colotrain.spec.plan import ModelPlan, RunPlan

SHARD_BYTES = 5 * 10**9
OWN_CONFIG = "colotrain.json"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The user's settings for an export."""

    step: int | None = None
    format: str = "auto"
    """auto, hf or safetensors."""
    adapter_only: bool = False
    """Whether to write the adapter alone, in PEFT's format, not merge it into the weights."""
    dtype: str | None = None
    shard_bytes: int = SHARD_BYTES


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


@dataclass(slots=True, kw_only=True)
class _Job:
    """An export in progress, into a folder beside the final one that is renamed when complete."""

    plan: RunPlan
    stored: CheckpointTensors
    choice: Choice
    folder: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)
    untied: bool = False
    """Whether tied parameters are written separately, because an adapter made them differ."""

    @property
    def dtype(self) -> torch.dtype | None:
        return DTYPES[self.choice.dtype] if self.choice.dtype else None


def export(rundir: RunDir, to: Path, choice: Choice, *, progress: Progress) -> Exported:
    """Write the model of a checkpoint of `rundir` to the new or empty directory `to`.

    One process writes one tensor at a time; the directory appears when it is complete. Raises
    `UsageError` for a directory that is not empty, a checkpoint that is absent or damaged, and a
    format that the model cannot be written in.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"--to {to}: is not empty", "give a new directory")
    plan, checkpoint = rundir.plan(), choose(rundir, choice.step)
    form = _format(plan.model, choice)
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = to.absolute().with_name(f".{to.absolute().name}.tmp-{os.getpid()}")
    folder.mkdir()
    job = _Job(
        plan=plan,
        stored=CheckpointTensors(checkpoint),
        choice=choice,
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
    known = model.hf is not None or model.target == llama.TARGET
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


def _write_hf(job: _Job) -> list[Entry]:
    if job.plan.model.hf is not None:
        return _write_hf_directory(job, Path(job.plan.model.hf))
    return _write_llama(job)


def _write_hf_directory(job: _Job, source: Path) -> list[Entry]:
    """Write the model under its own names, with its configuration and tokenizer."""
    model = _bare(job.plan.model)
    entries = _write_weights(job, as_in_files(_entries(job), model))
    settings = model.config.to_dict()  # type: ignore[operator,union-attr]
    settings.pop("auto_map", None)  # code is never exported
    settings.pop("torch_dtype", None)
    if job.untied:
        settings["tie_word_embeddings"] = False
    _write_json(job.folder / "config.json", {**settings, "dtype": _dtype_name(entries)})
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, job.folder / generation.name)
    trained_on = Path(job.plan.data.tokenizer)
    if job.plan.data.source == "target" or source in (trained_on, trained_on.parent):
        if not copy_tokenizer(source, job.folder):
            job.notes.append(f"no tokenizer: {source} has none")
    else:
        _try_tokenizer(job)
    return entries


def _write_llama(job: _Job) -> list[Entry]:
    model = _bare(job.plan.model)
    entries = [replace(e, name=llama.llama_name(e.name)) for e in _entries(job)]
    entries = _write_weights(job, entries)
    end = _try_tokenizer(job)
    config = llama.llama_config(
        model,  # type: ignore[arg-type]
        seq_len=job.plan.data.seq_len,
        dtype=_dtype_name(entries),
        end=end,
    )
    _write_json(job.folder / "config.json", config)
    return entries


def _write_plain(job: _Job) -> list[Entry]:
    """Write safetensors under the names of `named_parameters()`, and a JSON file about them."""
    entries = _write_weights(job, _entries(job))
    model = job.plan.model
    about = {
        "schema": 1,
        "format": "colotrain",
        "model": {"target": model.target, "hf": model.hf, "args": model.args},
        "step": step_of(job.stored.folder),
        "dtype": _dtype_name(entries),
    }
    _write_json(job.folder / OWN_CONFIG, about)
    job.notes.append(
        "transformers does not know this model: load the tensors into it by name"
        if model.hf is None
        else "tensors only: --format hf writes a directory that transformers loads"
    )
    return entries


def _write_peft(job: _Job) -> list[Entry]:
    """Write the adapter alone, in PEFT's format."""
    plan = job.plan.model
    assert plan.adapter is not None, "checked by _format"
    model = _on_meta(plan)
    names = [f"{name}.{part}.weight" for name in adapters.adapted(model) for part in "AB"]
    names = [name.replace(".A.", ".lora_A.").replace(".B.", ".lora_B.") for name in names]
    entries = [
        replace(_converted(job.stored.entries[n], job.dtype), name=adapters.PREFIX + n)
        for n in names
    ]
    total = sum(entry.num_bytes for entry in entries)
    path = job.folder / adapters.WEIGHTS
    write_file(path, entries, progress=lambda done: job.progress("writing", done, total))
    task = huggingface.peft_task(model)
    settings = adapters.peft_settings(model, plan.adapter, base=plan.hf, task=task)
    (job.folder / adapters.SETTINGS).write_text(adapters.to_json(settings), "utf-8")
    return entries


WRITERS: dict[str, Callable[[_Job], list[Entry]]] = {
    "hf": _write_hf,
    "safetensors": _write_plain,
    "peft": _write_peft,
}


def _entries(job: _Job) -> list[Entry]:
    """Every tensor to write: adapters merged into weights, untrained weights from the base."""

    plan, held = job.plan.model, job.stored.entries
    entries = {**_base(job), **held}
    unmerged = dict(entries)
    if plan.adapter is None:
        return list(entries.values())
    scale = plan.adapter.alpha / plan.adapter.rank
    model = _on_meta(plan)
    layers = adapters.adapted(model)
    known_as = names_by_parameter(model)
    for name, layer in layers.items():
        a = entries.pop(f"{name}.{adapters.A}.weight")
        b = entries.pop(f"{name}.{adapters.B}.weight")
        names = known_as[layer.weight]  # type: ignore[index]
        weight = unmerged[names[0]]
        if len(names) > 1:
            _untie(job, model, names)
            entries = {n: replace(weight, name=n) for n in names} | entries
        merged = _merge(weight, a, b, scale, adapters.is_transposed(layer))
        entries[f"{name}.weight"] = replace(weight, name=f"{name}.weight", read=merged)
    return list(entries.values())


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every name of each parameter; checkpoints use the first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _untie(job: _Job, model: nn.Module, names: list[str]) -> None:
    """Note that each name of a tied parameter gets its own tensor: the adapter changes only one.

    Raises `UsageError` where the format cannot express untied parameters.
    """
    plan = job.plan.model
    head = model.get_output_embeddings() if plan.hf is not None else None  # type: ignore[operator]
    is_head = head is not None and names_by_parameter(model).get(head.weight) == names
    if _format(plan, job.choice) == "hf" and not is_head:
        raise UsageError(
            f"merging the adapter of one of {', '.join(names)} would change the others, which are "
            "the same tensor",
            "use --adapter, or --format safetensors",
        )
    if not job.untied:
        job.notes.append(f"no longer tied, for the adapter is of one alone: {', '.join(names)}")
    job.untied = True


def _merge(
    weight: Entry, a: Entry, b: Entry, scale: float, transposed: bool
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        return adapters.merged(
            weight.read(), a.read(), b.read(), scale=scale, transposed=transposed
        )

    return read


def _base(job: _Job) -> dict[str, Entry]:
    """Initial values of the parameters that a checkpoint of trained parameters leaves out."""
    left_out = job.stored.left_out
    if not left_out:
        return {}
    plan = job.plan.model
    if plan.hf is not None:
        stored = StoredTensors(weight_files(Path(plan.hf)))
        found = huggingface.sources_of(_on_meta(plan)).found
        dtype = DTYPES[str(plan.args.get("dtype", "float32"))]
        return {n: _stored_entry(n, stored, found[n], dtype) for n in left_out}
    whole = dict(build_whole(plan, seed=job.plan.train.seed).named_parameters())
    return {n: _whole_entry(n, whole[n].detach()) for n in left_out}


def _stored_entry(name: str, stored: StoredTensors, source: Source, dtype: torch.dtype) -> Entry:
    return Entry(
        name=name,
        shape=source.shape,
        dtype=dtype,
        read=lambda: source.rows(stored).to(dtype),
    )


def _whole_entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor)


def _write_weights(job: _Job, entries: Sequence[Entry]) -> list[Entry]:
    converted = [_converted(entry, job.dtype) for entry in entries]
    total = sum(entry.num_bytes for entry in converted)
    _check_room(job.folder, total)
    write_files(
        job.folder,
        converted,
        shard_bytes=job.choice.shard_bytes,
        progress=lambda done: job.progress("writing", done, total),
    )
    return converted


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ColotrainError(
            f"{folder.parent}: {needed:,} bytes are needed and {free:,} are free",
            "make room, give another --to, or a smaller --dtype",
        )


def _converted(entry: Entry, dtype: torch.dtype | None) -> Entry:
    if dtype is None or not entry.dtype.is_floating_point:
        return entry
    return replace(entry, dtype=dtype)


def _try_tokenizer(job: _Job) -> int | None:
    if job.plan.data.source == "target":
        job.notes.append("no tokenizer: the run's data came from data.target")
        return None
    try:
        return write_tokenizer(job.plan.data, job.folder, progress=job.progress)
    except ColotrainError as error:
        job.notes.append(f"no tokenizer: {error.problem}")
        return None


def _bare(plan: ModelPlan) -> nn.Module:
    """The model without adapters and without storage."""
    return _on_meta(replace(plan, adapter=None))


def _on_meta(plan: ModelPlan) -> nn.Module:
    """The model on the meta device, or with real tensors where its constructor needs them."""
    model = build_on_meta(plan)
    return model if model is not None else build_whole(plan, seed=0)


def _dtype_name(entries: Sequence[Entry]) -> str:
    """Name of the floating-point dtype with the most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")
