"""An export in progress, and what every format writes alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colotrain.export.source import CheckpointTensors
from colotrain.export.stream import Entry, write_files
from colotrain.models.loading import build_on_meta, build_whole
from colotrain.rundir import check_room, read_json
from colotrain.spec.plan import ModelPlan, RunPlan

OWN_CONFIG = "colotrain.json"
"""File about weights that transformers has no architecture for."""
SHARD_BYTES = 5 * 10**9
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
    """None: that of the model directory, or as trained."""
    shard_bytes: int = SHARD_BYTES


@dataclass(slots=True, kw_only=True)
class Job:
    """An export in progress, into a folder beside the final one that is renamed when complete."""

    plan: RunPlan
    stored: CheckpointTensors
    choice: Choice
    format: str
    """hf, peft or safetensors."""
    folder: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)
    untied: bool = False
    """Whether tied parameters are written separately, because an adapter made them differ."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of what is written; None: each tensor's own."""
        name = self.choice.dtype or (
            "" if self.choice.adapter_only else dtype_of_directory(self.plan.model)
        )
        return DTYPES[name] if name else None


def call_of(model: ModelPlan) -> dict[str, Any]:
    """How the model is made, as `OWN_CONFIG` says it."""
    return {"target": model.target, "hf": model.hf, "args": model.args}


def dtype_of_directory(plan: ModelPlan) -> str:
    """Name of the dtype of the weights in the Hugging Face directory; empty: as trained."""
    if plan.hf is None or "dtype" in plan.args:
        return ""
    try:
        config = read_json(Path(plan.hf) / "config.json")
        name = str(config.get("dtype") or config.get("torch_dtype") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    return name if name in DTYPES else ""


def note_dtype(job: Job, entries: Sequence[Entry]) -> None:
    """Note where weights are written in another dtype than they were trained in, unasked."""
    trained, written = dtype_name(job.stored.entries.values()), dtype_name(entries)
    if job.choice.dtype is None and trained != written:
        job.notes.append(
            f"trained in {trained}, written in {written} as {job.plan.model.hf} has it: "
            f"--dtype {trained} writes what was trained"
        )


def write_weights(job: Job, entries: Sequence[Entry]) -> list[Entry]:
    entries = [converted(entry, job.dtype) for entry in entries]
    total = sum(entry.num_bytes for entry in entries)
    check_room(job.folder.parent, total, "make room, give another --to, or a smaller --dtype")
    write_files(
        job.folder,
        entries,
        shard_bytes=job.choice.shard_bytes,
        progress=lambda done: job.progress("writing", done, total),
    )
    return entries


def converted(entry: Entry, dtype: torch.dtype | None) -> Entry:
    if dtype is None or not entry.dtype.is_floating_point:
        return entry
    return replace(entry, dtype=dtype)


def bare(plan: ModelPlan) -> nn.Module:
    """The model without adapters and without storage, with whole weights."""
    return on_meta(replace(plan, adapter=None, quantize=None))


def on_meta(plan: ModelPlan) -> nn.Module:
    """The model on the meta device, or with real tensors where its constructor needs them."""
    model = build_on_meta(plan)
    return model if model is not None else build_whole(plan, seed=0)


def dtype_name(entries: Iterable[Entry]) -> str:
    """Name of the floating-point dtype with the most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file in place of the one that is there, whatever a link leads to."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
