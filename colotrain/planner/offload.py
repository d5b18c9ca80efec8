"""Bytes per group of gemini and their planned tier, computed without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colotrain.planner.groups import shard_numel
from colotrain.planner.layout import baseline_bytes
from colotrain.planner.memory import Estimate, around
from colotrain.planner.model_states import Transient
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.offload import (
    Budget,
    Declared,
    GroupBytes,
    NonModelBytes,
    Placement,
    bytes_by_tier,
    estimate_non_model,
    group_bytes,
    moved_bytes,
    place,
    streaming_bytes,
    with_margin,
)
from colotrain.spec.packing import Chunk, pack, padding, units_of
from colotrain.spec.plan import OptimPlan, PluginPlan
from colotrain.spec.survey import ParameterInfo, Survey

NOTHING = Transient(activations=0, gathered=None)


def chunks_of(plugin: PluginPlan, survey: Survey) -> list[Chunk]:
    """Groups that `plugin` packs if every module is called once per forward."""
    assert plugin.chunk_bytes is not None
    return pack(units_of(survey.parameters, split=plugin.split_blocks), plugin.chunk_bytes)


def members(chunks: Sequence[Chunk], survey: Survey) -> list[list[ParameterInfo]]:
    """The parameters of each chunk, and last those of the root group, which has the rest."""
    owner = {name: index for index, chunk in enumerate(chunks) for name in chunk.names}
    found: list[list[ParameterInfo]] = [[] for _ in range(len(chunks) + 1)]
    for parameter in survey.parameters:
        parts = parameter.name.split(".")
        above = (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
        index = next((owner[name] for name in above if name in owner), len(chunks))
        found[index if parameter.group else len(chunks)].append(parameter)
    return found


def planned_bytes(plugin: PluginPlan, survey: Survey, optim: OptimPlan) -> list[GroupBytes]:
    """Bytes of each group on a rank with padding, those of the root group last."""
    chunks = chunks_of(plugin, survey)
    names = [chunk.names[0] for chunk in chunks] + [""]
    per_row = optim.state_bytes_per_row
    return [
        group_bytes(name, map(_declared, inside), ranks=plugin.dp_shard, state_per_row=per_row)
        for name, inside in zip(names, members(chunks, survey), strict=True)
    ]


def _declared(parameter: ParameterInfo) -> Declared:
    trains = parameter.frozen_by is None
    return Declared(shape=parameter.shape, itemsize=parameter.itemsize, trains=trains)


def predict(
    plugin: PluginPlan,
    survey: Survey,
    optim: OptimPlan,
    device: str,
    *,
    transient: Transient = NOTHING,
    safety: float = 1.0,
) -> tuple[list[GroupBytes], Placement, NonModelBytes]:
    """Bytes per group, the placement they lead to, and the bytes of a rank that are not model data.

    `transient` is that of `non_model_bytes`. Where it knows `gathered`, the placement leaves
    `MARGIN` free beside it, as the run does. Elsewhere `safety` is `SAFETY` for a run's first
    placement, 1 for the one after its measurements.
    """
    assert plugin.budget is not None
    sizes = planned_bytes(plugin, survey, optim)
    process = 0  # on CUDA the context is outside the budget
    if device == "cpu":
        process = baseline_bytes(device, survey.libraries)
    if transient.gathered is not None:
        below: set[str] = set()
        while True:  # what is moved below the GPU needs room for its copies, more may have to go
            compute = transient.activations + transient.gathered + transient.staged(below)
            non_model = NonModelBytes(compute=compute, update=process)
            placement = place(sizes, plugin.budget, with_margin(non_model), device=device)
            each = zip(sizes, placement.groups, strict=True)
            moved = {size.name for size, its in each if its.parameters != placement.top} - below
            if not moved:
                return sizes, placement, non_model
            below |= moved
    non_model = estimate_non_model(
        sizes,
        ranks=plugin.dp_shard,
        process=process,
        activations=transient.activations,
        safety=safety,
    )
    return sizes, place(sizes, plugin.budget, non_model, device=device), non_model


def least_bytes(sizes: Sequence[GroupBytes], plugin: PluginPlan) -> int:
    """Least bytes of a budget: root and largest group gathered, or one group's update if larger."""
    whole = max((size.parameters for size in sizes[:-1]), default=0) + sizes[-1].parameters
    update = max(size.parameters + size.gradients + size.optimizer for size in sizes)
    return max(plugin.dp_shard * whole, update)


def offloaded_estimate(
    plugin: PluginPlan,
    survey: Survey,
    optim: OptimPlan,
    device: str,
    *,
    transient: Transient,
) -> Estimate | None:
    """Memory that the placement needs in the top tier; None where nothing is offloaded.

    The transient part is that of forward and backward or that of the update, whichever is more:
    they do not exist at the same time. Only bytes that no lower tier can hold are certain, because
    a run decides its placement again after measuring.
    """
    sizes, placement, non_model = predict(plugin, survey, optim, device, transient=transient)
    activations = transient.activations
    if not placement.streams:
        return None
    top, here = placement.top, bytes_by_tier(sizes, placement)
    resting = {kind: tiers.get(top, 0) for kind, tiers in here.items()}
    window = streaming_bytes(sizes, placement.groups, top)
    if transient.gathered is not None:  # the run reads both in its plan
        gathered = non_model.compute - activations
        more = max(0, non_model.update + window - non_model.compute)
        breakdown = MemoryBreakdown(
            **resting, gathered=gathered, activations=activations, buffers=more
        )
    elif non_model.update + window > non_model.compute:
        breakdown = MemoryBreakdown(**resting, buffers=window, baseline=non_model.update)
    else:
        rest = non_model.compute - non_model.update - activations
        beside = {"gathered": rest, "activations": activations}
        breakdown = MemoryBreakdown(**resting, **beside, baseline=non_model.update)
    exact = min(breakdown.total, non_model.update + max(activations, least_bytes(sizes, plugin)))
    return Estimate(
        breakdown=breakdown, peak=around(breakdown.total, exact=exact, beside=transient.beside)
    )


def describe_groups(plugin: PluginPlan, survey: Survey) -> dict[str, Any]:
    """Bytes of unsharded parameters per group, and their padding."""
    chunks, ranks = chunks_of(plugin, survey), plugin.dp_shard
    *inside, rest = members(chunks, survey)
    sizes = [sum(p.numel * p.itemsize for p in group) for group in inside]
    padded = sum(shard_numel(p, ranks) * ranks * p.itemsize for p in survey.parameters)
    return {
        "chunk_bytes": plugin.chunk_bytes,
        "count": len(chunks),
        "smallest": min(sizes, default=0),
        "largest": max(sizes, default=0),
        "rest": sum(p.numel * p.itemsize for p in rest),
        "unused_share": padding(sizes),
        "padding": padded - sum(p.numel * p.itemsize for p in survey.parameters),
        "members": [list(chunk.names) for chunk in chunks],
        "bytes": sizes,
    }


def describe_tiers(
    plugin: PluginPlan,
    survey: Survey,
    optim: OptimPlan,
    device: str,
    *,
    transient: Transient,
    micro_batches: int,
) -> dict[str, Any]:
    """Bytes per tier, and bytes that a step moves; without a budget all are in the top tier."""
    sizes = planned_bytes(plugin, survey, optim)
    if plugin.budget is None:
        unlimited = Budget(device_bytes=1 << 60, host_bytes=1 << 60, disk_bytes=0, disk_path=None)
        placement = place(sizes, unlimited, NonModelBytes(compute=0, update=0), device=device)
    else:
        _, placement, _ = predict(plugin, survey, optim, device, transient=transient)
    moved = moved_bytes(sizes, placement, micro_batches=micro_batches)
    return {"bytes": bytes_by_tier(sizes, placement), "moved_bytes": moved}
