"""A run's adapters alone, in PEFT's format, with every other parameter that trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
from colotrain.export.values import base_entries, initial_entries
from colotrain.models import adapters, huggingface
from colotrain.models.adapter_kinds.bases import Product

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
    stored = {part.name: part.stored for part in adapters.parts(model)}
    modules = _trained_modules(job, model)
    held = job.stored.entries | _with_products(job, model)
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
        model, plan.adapter, base=plan.hf, task=huggingface.peft_task(model)
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


def _with_products(job: Job, model: nn.Module) -> dict[str, Entry]:
    """Matrices that hold what training changed of the layers' weights, too.

    The checkpoint's rows of A are the first ones, and its columns of B.
    """
    changes = dict(adapters.base_changes(model, job.plan.model.adapter))
    if not changes:
        return {}
    if job.dtype is not None and job.dtype.itemsize < 4:
        raise UsageError(
            f"--dtype {job.choice.dtype}: what the adapter began with is subtracted in the file, "
            "where it would be rounded",
            "leave out --dtype, or merge the adapters (leave out --adapter)",
        )
    weights = initial_entries(job, [f"{name}.weight" for name in changes])
    found: dict[str, Entry] = {}
    for name, change in changes.items():
        products = lru_cache(1)(partial(_products, change, weights[f"{name}.weight"]))
        for role, dim in ((adapters.A, 0), (adapters.B, 1)):
            own = job.stored.entries[f"{name}.{role}.weight"]
            read = partial(_joined, own, products, role, dim, change.scale)
            shape = [*own.shape]
            shape[dim] *= 2
            found[own.name] = replace(own, shape=tuple(shape), read=read)
    return found


def _products(change: adapters.BaseChange, weight: Entry) -> list[Product]:
    return change.products(weight.read())


def _joined(
    own: Entry, products: Callable[[], list[Product]], role: str, dim: int, scale: float
) -> Tensor:
    """The trained matrix, and those of the products, as if they had the adapter's scale."""
    if role == adapters.A:
        others = [product.a for product in products()]
    else:
        others = [product.b * (product.scale / scale) for product in products()]
    return torch.cat([own.read(), *(other.to(own.dtype) for other in others)], dim)


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
