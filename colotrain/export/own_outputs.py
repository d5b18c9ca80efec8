"""What the run's own model computes with a checkpoint's values, and the samples of a check."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.prepare.prepared import Split
from colotrain.data.read.loader import (
    BatchLoader,
    Samples,
    count_evaluated,
    open_samples,
    planned_collate,
    planned_draw_seed,
    planned_order,
)
from colotrain.data.read.samples import rest_of
from colotrain.engine.model.freezing import names_of
from colotrain.export.reader import flat_logits, weighted
from colotrain.export.source import CheckpointTensors
from colotrain.generators import seeded
from colotrain.models import adapters
from colotrain.models.loading import build_whole
from colotrain.models.objective import attach_, inputs_of, output_of
from colotrain.models.quantized.layers import dequantize_
from colotrain.spec.plan import RunPlan

Batch = dict[str, Tensor]


def own_model(
    plan: RunPlan,
    stored: CheckpointTensors,
    *,
    written: torch.dtype,
    beside_base: Collection[str] = (),
) -> Any:
    """The run's model with the values of a checkpoint, rounded as in the files.

    `written` is the dtype there. `beside_base`: the parameters in the files of an adapter that is
    not merged, by their names there. Without half precision nothing is rounded and adapters stay
    apart from what they are merged with, so that the sums are checked.
    """
    model = build_whole(plan.model, seed=plan.train.seed).eval()
    with torch.no_grad():
        for name, tensor in [
            *module_tree.named_parameters(model),
            *module_tree.named_buffers(model),
        ]:
            if name in stored.entries:
                tensor.copy_(stored.entries[name].read())
        dequantize_(model)
        if written.itemsize < 4 or not computes_in_float32(model):
            if not beside_base:
                _merge_(model)
            names = {part.name: part.stored for part in adapters.parts(model)}
            for name, parameter in module_tree.named_parameters(model):
                inside = names.get(name, name).removeprefix(adapters.PREFIX)
                if not beside_base or inside in beside_base:
                    parameter.copy_(parameter.to(written))
    attach_(model, plan.model)
    return model


def in_float32(model: Any, plan: RunPlan, *, beside_base: Collection[str] = ()) -> Any:
    """The model as the reader loads it, in float32, if it is transformers' in half precision.

    Without `beside_base`, its adapters are merged (`own_model`).
    """
    if plan.model.hf is None or computes_in_float32(model):
        return model
    args = {**plan.model.args, "dtype": "float32"}
    made = replace(plan.model, args=args, quantize=None)
    loaded = build_whole(made, seed=plan.train.seed).eval()
    loaded.load_state_dict(model.state_dict())
    if not beside_base:
        for merge in _mergeable(loaded):
            merge.detach_()
    attach_(loaded, plan.model)
    return loaded


def computes_in_float32(model: nn.Module) -> bool:
    """Whether all of a model's parameters are float32 or wider."""
    floats = (p for _, p in module_tree.named_parameters(model) if p.is_floating_point())
    return all(p.element_size() >= 4 for p in floats)


def _mergeable(model: nn.Module) -> list[adapters.Merge]:
    """How adapters are merged of parameters that are no other module's, too."""
    known_as = names_of(model)
    return [m for m in adapters.merges(model) if len(known_as[m.parameter]) == 1]


def _merge_(model: nn.Module) -> None:
    values = dict(module_tree.named_parameters(model))
    for merge in _mergeable(model):
        parts = [values[name] for name in merge.parts]
        merge.parameter.copy_(merge.merged(merge.parameter, *parts))
        merge.detach_()


@torch.no_grad()
def outputs_of(model: nn.Module, sample: Batch, request: dict[str, Any]) -> Tensor:
    """Logits of a sample, flat; of a model of the user's own, its loss."""
    if request["outputs"] == "loss":
        ways = weighted(output_of(model, sample), sample, request["loss"]["ignored"])
        return ways[0][0].double().reshape(1)
    has_function = request["loss"]["kind"] == "function"
    return flat_logits(model(**inputs_of(model, sample) if has_function else sample))


def evaluation_loader(plan: RunPlan) -> BatchLoader | None:
    """The batches of an evaluation of the run, read by one process; None where there are none."""
    samples = _samples(plan, "validation")
    end = count_evaluated(samples, plan) if len(samples) else 0
    return _loader(samples, plan, "validation", end=end) if end else None


def _loader(
    samples: Samples, plan: RunPlan, split: Split, *, end: int | None = None
) -> BatchLoader:
    """The plan's batches as one process reads them: it has all micro-batches of a step.

    Where losses depend on the whole global batch, that is one micro-batch.
    """
    objective, size = plan.model.objective, plan.batch.micro_batch
    if objective is not None and objective.passes_before:
        size = plan.batch.global_batch
    steps = plan.batch.global_batch // size
    return BatchLoader(
        samples,
        planned_order(samples, plan, split),
        replace(plan.batch, micro_batch=size, data_parallel=1, accumulation_steps=steps),
        rank=0,
        draw_seed=planned_draw_seed(samples, plan),
        end=end,
        collate=planned_collate(plan.data),
    )


def _samples(plan: RunPlan, split: Split) -> Samples:
    with seeded(plan.train.seed):
        rest = rest_of(open_samples(plan.data, "train")) if split == "validation" else None
    if rest is not None:
        return rest
    with seeded(plan.train.seed):
        return open_samples(plan.data, split)


def evaluation_batches(loader: BatchLoader) -> Iterator[Batch]:
    total = loader.num_micro_batches
    assert total is not None
    for index in range(total):
        yield loader.micro_batch(*divmod(index, loader.batch.accumulation_steps))


def first_rows(plan: RunPlan, loader: BatchLoader | None, count: int) -> list[Batch]:
    """Batches of one sample: the first of an evaluation, or else of training."""
    if loader is None:
        loader = _loader(_samples(plan, "train"), plan, "train")
    batch = loader.micro_batch(0, 0)
    rows = len(next(iter(batch.values())))
    return [{n: t[row : row + 1] for n, t in batch.items()} for row in range(min(rows, count))]
