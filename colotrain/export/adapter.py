"""A run's adapters alone, in PEFT's format, with every other parameter that trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.model.freezing import freeze_, names_of
from colotrain.engine.state.checkpoint import step_of
from colotrain.errors import UsageError
from colotrain.export.job import Job, converted, on_meta
from colotrain.export.prompting import complete_prompting
from colotrain.export.stream import Entry, write_file
from colotrain.export.tokenizer import write_run_tokenizer
from colotrain.export.values import base_entries, initial_entries, refuse_other_bases
from colotrain.models import adapters, huggingface
from colotrain.models.adapter_kinds.bases import BaseChange, Product

MERGE = "merge the adapters (leave out --adapter), or freeze them"


def write_peft(job: Job) -> list[Entry]:
    """Write adapter_model.safetensors, adapter_config.json and the tokenizer.

    Modules with a parameter of their own that trained are whole in the file, as PEFT's
    `modules_to_save`. Raises `UsageError` for what PEFT cannot put beside its adapters.
    """
    plan = job.plan.model
    assert plan.adapter is not None, "checked when the format was chosen"
    model = on_meta(plan)
    if plan.hf is not None and (grown := next(huggingface.names_with_new_rows(model), None)):
        raise UsageError(
            f"--adapter: {grown} has rows of added tokens, which {plan.hf} lacks, and PEFT puts "
            "adapters on that directory as it is",
            "merge the adapters: leave out --adapter",
        )
    modules = _trained_modules(job, model)
    joined = _with_products(job, model, modules)
    stored = {name: adapters.PREFIX + name for name in joined}
    stored |= {part.name: part.stored for part in adapters.parts(model)}
    held = job.stored.entries | joined
    for part in adapters.parts(model):
        if part.name not in joined:
            held[part.name] = replace(
                held[part.name], read=partial(_as_stored, part, held[part.name])
            )
    entries = [
        replace(held[n], name=stored[n].removeprefix(adapters.PREFIX)) for n in sorted(stored)
    ]
    if modules:
        entries += _module_entries(job, model, modules)
    entries = [
        replace(converted(entry, job.dtype), name=adapters.PREFIX + entry.name) for entry in entries
    ]
    total = sum(entry.num_bytes for entry in entries)
    path = job.folder / adapters.WEIGHTS
    write_file(path, entries, progress=lambda done: job.progress("writing", done, total))
    settings = adapters.peft_settings(
        *(model, plan.adapter),
        base=plan.hf,
        task=huggingface.peft_task(model),
        left_out=[
            name
            for name, _ in adapters.base_changes(model, plan.adapter)
            if f"{name}.{adapters.A}.weight" not in joined
        ],
    )
    settings["modules_to_save"] = modules or None
    if modules:
        whole = ", ".join(modules)
        job.notes.append(f"{whole} trained, too: whole in the file (modules_to_save)")
    (job.folder / adapters.SETTINGS).write_text(adapters.to_json(settings), "utf-8")
    write_run_tokenizer(job, source=plan.hf)
    if plan.hf is not None:
        complete_prompting(job, model.config.to_dict())  # type: ignore[operator,union-attr]
    return entries


def _as_stored(part: adapters.AdapterPart, held: Entry) -> Tensor:
    return part.as_stored(held.read())


def _with_products(job: Job, model: nn.Module, modules: Sequence[str]) -> dict[str, Entry]:
    """Matrices that hold what changed the layers' weights before training, too.

    The checkpoint's rows of A are the first ones, and its columns of B. They are in float32 or
    wider. What is in `modules` is whole in the file, with its changes.
    """
    plan = job.plan.model.adapter
    inside = tuple(f"{module}." for module in modules)
    changes = {
        name: change
        for name, change in adapters.base_changes(model, plan)
        if not f"{name}.".startswith(inside)
    }
    if not changes:
        return {}
    refuse_other_bases(job)
    if job.dtype is not None and job.dtype.itemsize < 4:
        raise UsageError(
            f"--dtype {job.choice.dtype}: what was added to the weights before training is in the "
            "file, where it would be rounded",
            "leave out --dtype, or merge the adapters (leave out --adapter)",
        )
    if plan is not None and plan.name == "dora":
        raise UsageError(
            "--adapter: DoRA's magnitudes are of weights to which adapter.merge added something",
            MERGE,
        )
    weights = initial_entries(job, [f"{name}.weight" for name in changes])
    if rounded := next((w.dtype for w in weights.values() if w.dtype.itemsize < 4), None):
        kind = str(rounded).removeprefix("torch.")
        raise UsageError(
            f"--adapter: weights in {kind} were rounded when adapter.merge or adapter.init changed "
            "them, which no adapter can hold",
            f"{MERGE}; in runs with model.args.dtype=float32 an adapter is the same",
        )
    found: dict[str, Entry] = {}
    for name, change in changes.items():
        weight = weights[f"{name}.weight"]
        products = lru_cache(1)(partial(_products, change, weight))
        outputs, inputs = weight.shape[::-1] if change.transposed else weight.shape
        rank = change.rank
        for role, shape in ((adapters.A, (rank, inputs)), (adapters.B, (outputs, rank))):
            own = job.stored.entries.get(f"{name}.{role}.weight")
            if own is not None:
                is_a = role == adapters.A
                shape = (own.shape[0] + rank, inputs) if is_a else (outputs, own.shape[1] + rank)
            dtype = torch.promote_types((own or weight).dtype, torch.float32)
            read = partial(_joined, own, products, role, change.scale, dtype)
            entry = Entry(name=f"{name}.{role}.weight", shape=shape, dtype=dtype, read=read)
            found[entry.name] = entry
    return found


def _products(change: BaseChange, weight: Entry) -> list[Product]:
    return change.products(weight.read())


def _joined(
    own: Entry | None,
    products: Callable[[], list[Product]],
    role: str,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The trained matrix, and those of the products, as if they had the adapter's scale."""
    if role == adapters.A:
        others = [product.a for product in products()]
    else:
        others = [product.b.to(dtype) * (product.scale / scale) for product in products()]
    first = [] if own is None else [own.read()]
    return torch.cat([t.to(dtype) for t in (*first, *others)], 0 if role == adapters.A else 1)


def _trained_modules(job: Job, model: nn.Module) -> list[str]:
    """Names of the modules that have a parameter, other than an adapter's, which trained."""
    freeze_(model, job.plan.freeze, step=step_of(job.stored.folder))
    parts = {part.name for part in adapters.parts(model)}
    adapted = {merge.weight.rpartition(".")[0] for merge in adapters.merges(model)}
    found: dict[str, None] = {}
    for parameter, names in names_of(model).items():
        if parameter.requires_grad and parts.isdisjoint(names):
            for name in names:
                found[_checked_owner(name, adapted)] = None
    modules = [name for name in found if not any(name.startswith(f"{a}.") for a in found)]
    everything = [name for name, _ in module_tree.named_modules(model)]
    for module in modules:
        alike = [name for name in everything if name.endswith(module) and name not in modules]
        if alike:
            raise UsageError(
                f"--adapter: {module} trained, and PEFT would take {alike[0]} for it, too", MERGE
            )
    return modules


def _checked_owner(name: str, adapted: Collection[str]) -> str:
    """The module that owns a parameter; raises `UsageError` where PEFT cannot keep a copy of it."""
    owner = name.rpartition(".")[0]
    inside = [layer for layer in adapted if layer == owner or layer.startswith(f"{owner}.")]
    if not owner or inside:
        why = f"{inside[0]} has an adapter" if inside else "it is the model's own"
        raise UsageError(
            f"--adapter: {name} trained beside the adapters, which has no place in PEFT's format "
            f"({why})",
            MERGE,
        )
    return owner


def _module_entries(job: Job, model: nn.Module, modules: list[str]) -> Iterator[Entry]:
    """Every parameter and persistent buffer in the modules, a tied one under each of its names."""
    values = {**base_entries(job), **job.stored.entries}
    first = {name: names[0] for names in names_of(model).values() for name in names}
    for module in modules:
        for own in model.get_submodule(module).state_dict():
            name = f"{module}.{own}"
            yield replace(values[first.get(name, name)], name=name)
