"""The values that an export writes: of a checkpoint, of the base model, and adapters merged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.model.freezing import names_of
from colotrain.errors import UsageError
from colotrain.export.job import Job, on_meta
from colotrain.export.stream import Entry
from colotrain.models import adapters, huggingface
from colotrain.models.adapter_kinds.bases import BaseChange
from colotrain.models.huggingface_files import Source
from colotrain.models.huggingface_match import sources_of
from colotrain.models.loading import build_whole
from colotrain.models.quantized.filling import packed_part, packed_rows
from colotrain.models.quantized.layers import packed_weights, scales_of
from colotrain.models.quantized.schemes import Packed
from colotrain.models.quantized.stored import open_weights
from colotrain.models.quantized.weights import PackedWeight
from colotrain.models.stored import StoredTensors


def whole_entries(job: Job) -> list[Entry]:
    """Every tensor to write: adapters merged into weights, untrained weights from the base."""

    plan, held = job.plan.model, job.stored.entries
    entries = {**base_entries(job), **held}
    if plan.adapter is None:
        return list(entries.values())
    model = on_meta(plan)
    _unpack_(entries, model)
    unmerged = dict(entries)
    known_as = names_of(model)
    for merge in adapters.merges(model):
        parts = [entries.pop(name) for name in merge.parts]
        names = known_as[merge.parameter]
        weight = unmerged[names[0]]
        if len(names) > 1:
            _untie(job, model, names)
            entries = {n: replace(weight, name=n) for n in names} | entries
        read = partial(_merged, merge, [weight, *parts])
        entries[merge.weight] = replace(weight, name=merge.weight, read=read)
    return list(entries.values())


def _unpack_(entries: dict[str, Entry], model: nn.Module) -> None:
    """Put the weights that blocks stand for in place of the codes and scales of a checkpoint."""
    for name, weight in packed_weights(model).items():
        if (scales := entries.pop(scales_of(name), None)) is not None:
            read = partial(_read_blocks, weight, entries[name], scales)
            entries[name] = _weight_entry(name, weight, read)


def _read_blocks(weight: PackedWeight, codes: Entry, scales: Entry) -> Tensor:
    return _whole_of(weight, Packed(codes.read(), scales.read()))


def _weight_entry(name: str, weight: PackedWeight, read: Callable[[], Tensor]) -> Entry:
    return Entry(name=name, shape=weight.shape, dtype=weight.dtype, read=read)


def _untie(job: Job, model: nn.Module, names: list[str]) -> None:
    """Note that each name of a tied parameter gets its own tensor: the adapter changes only one.

    Raises `UsageError` where the format cannot express untied parameters.
    """
    plan = job.plan.model
    head = model.get_output_embeddings() if plan.hf is not None else None  # type: ignore[operator]
    is_head = head is not None and names_of(model).get(head.weight) == names
    if job.format == "hf" and not is_head:
        raise UsageError(
            f"merging the adapter of one of {', '.join(names)} would change the others, which are "
            "the same tensor",
            "use --adapter, or --format safetensors",
        )
    if not job.untied:
        job.notes.append(f"no longer tied, for the adapter is of one alone: {', '.join(names)}")
    job.untied = True


def _merged(merge: adapters.Merge, entries: list[Entry]) -> Tensor:
    return merge.merged(*(entry.read() for entry in entries))


def base_entries(job: Job) -> dict[str, Entry]:
    """Initial values of the parameters that a checkpoint of trained parameters leaves out."""
    if job.stored.left_out:
        refuse_other_bases(job)
    entries = initial_entries(job, job.stored.left_out)
    for name, change in adapters.base_changes(on_meta(job.plan.model), job.plan.model.adapter):
        if (weight := entries.get(f"{name}.weight")) is not None:
            entries[weight.name] = replace(weight, read=partial(_changed, change, weight))
    return entries


def refuse_other_bases(job: Job) -> None:
    """Raise `UsageError` where what the run began with is not there any more, or is another."""
    plan, stored = job.plan.model, job.stored
    try:
        if stored.beneath != adapters.changes_beneath(plan.adapter):
            problem = "adapter.merge: the run merged other adapters than those that are there now"
            raise UsageError(problem, "put these back as they were")
        files = stored.began_with.get("files")
        if files and plan.hf and files != huggingface.fingerprint(Path(plan.hf)):
            problem = f"{plan.hf}: the run began with other weights"
            raise UsageError(problem, "put these back as they were")
    except OSError as error:
        problem = f"{error.filename}: what the run began with cannot be read: {error.strerror}"
        raise UsageError(problem, "put it back as it was") from error


def _changed(change: BaseChange, weight: Entry) -> Tensor:
    return change.apply(weight.read())


def initial_entries(job: Job, left_out: Collection[str]) -> dict[str, Entry]:
    """Values of parameters in the directory, or as the seed gives them: before adapters came."""
    if not left_out:
        return {}
    plan = job.plan.model
    if plan.hf is not None:
        stored, model = open_weights(Path(plan.hf)), on_meta(plan)
        found = sources_of(model).found
        dtypes = {n: p.dtype for n, p in module_tree.named_parameters(model)}
        drawn = huggingface.missing_values(model, plan, job.plan.train.seed)
        packed = {n: weight for n, weight in packed_weights(model).items() if n in left_out}
        own = {own for name in packed for own in (name, scales_of(name))}
        whole_names = [n for n in left_out if n in found and n not in own]
        read = {n: _stored_entry(n, stored, found[n], dtypes[n]) for n in whole_names}
        for name, weight in packed.items():
            pack = partial(_packed_again, weight, stored, found[name])
            read[name] = _weight_entry(name, weight, pack)
        return read | {n: _whole_entry(n, drawn[n]) for n in left_out if n in drawn}
    made = build_whole(replace(plan, adapter=None, quantize=None), seed=job.plan.train.seed)
    known = {name: parameter.detach() for name, parameter in made.named_parameters()}
    packed = packed_weights(on_meta(plan)) if plan.quantize is not None else {}
    known |= {n: _whole_of(w, w.as_held(packed_part(w, known[n]))) for n, w in packed.items()}
    scales = {scales_of(name) for name in packed}
    return {n: _whole_entry(n, known[n]) for n in left_out if n not in scales}


def _packed_again(weight: PackedWeight, stored: StoredTensors, source: Source) -> Tensor:
    """Return the weight that the run computed with: of blocks made of the directory, as before."""
    blocks = packed_rows(weight, stored, source, begin=0, num=weight.num_blocks)
    return _whole_of(weight, weight.as_held(blocks))


def _whole_of(weight: PackedWeight, packed: Packed) -> Tensor:
    return weight.whole(packed=packed).contiguous()


def _stored_entry(name: str, stored: StoredTensors, source: Source, dtype: torch.dtype) -> Entry:
    return Entry(
        name=name,
        shape=source.shape,
        dtype=dtype,
        read=lambda: source.rows(stored).to(dtype),
    )


def _whole_entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor)
