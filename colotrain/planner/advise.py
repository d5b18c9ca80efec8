"""Search over plugins, micro-batches, checkpointing and axes for what fits, the fastest first.

Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from colotrain.errors import UsageError
from colotrain.planner.context import Option, PlanningContext
from colotrain.planner.layout import Layout, layout_of
from colotrain.spec.divisions import Divisions
from colotrain.spec.plan import Recompute, RunPlan
from colotrain.spec.survey import Survey

MOST_SAMPLES = 1024
"""Largest micro-batch that is tried."""
TIE = 1.01
"""Ratio up to which predicted times count as equal; the option listed first is then taken."""
Changes = dict[str, Any]
"""Settings by dotted key."""
LEAST: Changes = {
    "plugin.name": "zero3",
    "train.micro_batch": 1,
    "train.activation_checkpointing": "full",
}
"""Settings that need the least memory without offloading."""
SMALL: Changes = {"plugin.name": "auto", "train.micro_batch": 1}


def every(
    context: PlanningContext,
    layouts: Iterable[tuple[str, Layout]],
    *,
    checkpointing: Iterable[Recompute],
) -> Iterator[Option]:
    """Each layout with each possible micro-batch and each kind of checkpointing."""
    batch = context.batch
    ways = [recompute for recompute in checkpointing if can(context, recompute)]
    for plugin, layout in layouts:
        for size in micro_batches(batch.share):
            sized = replace(layout, micro_batch=size, accumulation_steps=batch.share // size)
            for recompute in ways:
                yield context.option_of(plugin, sized, checkpointing=recompute)


def can(context: PlanningContext, recompute: Recompute) -> bool:
    """Whether the model can be traced with this kind of checkpointing."""
    try:
        return context.stage.traces(recompute, 1) is not None
    except UsageError:
        return False


def micro_batches(share: int) -> list[int]:
    """Sizes that divide `share` samples, powers of two where there are any."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    return [size for size in sizes if size & (size - 1) == 0] or sizes[:1]


def rank(options: Iterable[Option]) -> list[Option]:
    """Options that surely fit, the fastest first; without times in the order given."""
    return sorted((o for o in options if o.verdict == "yes"), key=lambda option: option.time.step_s)


def best(options: Sequence[Option]) -> Option | None:
    """The fastest option that surely fits; the first of equally fast ones.

    If none surely fits: of those that perhaps fit, the one with the least memory.
    """
    fitting = [option for option in options if option.verdict == "yes"]
    if not fitting:
        perhaps = [option for option in options if option.verdict == "tight"]
        return min(perhaps, key=lambda option: option.memory.total, default=None)
    limit = TIE * min(option.time.step_s for option in fitting)
    return next(option for option in fitting if option.time.step_s <= limit)


def largest_micro_batch(
    context: PlanningContext, layout: Layout, *, checkpointing: Recompute
) -> int:
    """The largest power of two that fits as micro-batch, for any global batch; 0 if none."""

    def has_room(size: int) -> bool:
        need = context.need(replace(layout, micro_batch=size), checkpointing=checkpointing)
        return need.peak.verdict(context.scale.memory_bytes) == "yes"

    if context.stage.traces(checkpointing, 1) is None or not has_room(1):
        return 0
    size = 1
    while size < MOST_SAMPLES and has_room(2 * size):
        size = 2 * size
    return size


def sizes_of_axes(survey: Survey, plan: RunPlan) -> dict[str, list[int]]:
    """The sizes of each axis that the model allows and a node has ranks for, 1 included."""
    procs = plan.cluster.procs_per_node
    sizes = [size for size in range(1, procs + 1) if procs % size == 0]

    def dividing(how: Divisions | None) -> list[int]:
        return [n for n in sizes if n == 1 or (how and how.dims and how.allows(n))]

    return {
        "mesh.cp": sizes if survey.divides_sequences else [1],
        "mesh.tp": dividing(survey.divisions),
        "mesh.ep": dividing(survey.experts),
    }


def other_meshes(context: PlanningContext, plan: RunPlan) -> Iterator[Option]:
    """The plan with every other product of the axes that fits a node, each under its best plugin.

    With the plan's recomputation; where that does not surely fit, with full recomputation. Each
    needs a trace of its own, for ranks hold parts of the model's layers, so they are tried at the
    smallest micro-batch alone.
    """
    sizes, own = sizes_of_axes(context.stage.survey, plan), plan.mesh
    for cp, tp, ep in itertools.product(*sizes.values()):
        other = replace(own, cp=cp, tp=tp, ep=ep)
        unit = other.unit(plan.cluster.nodes)
        if other == own or plan.cluster.procs_per_node % unit:
            continue
        changes = SMALL | {"mesh.cp": cp, "mesh.tp": tp, "mesh.ep": ep}
        if own.sequence_parallel and tp == 1:
            changes |= {"mesh.sequence_parallel": False}
        made = context.changed_plan(changes)
        if made is None or made.peak.verdict(made.cluster.memory_bytes) != "yes":
            full = context.changed_plan(changes | {"train.activation_checkpointing": "full"})
            made = full or made
        if made is not None:
            yield _option(made)


def _option(plan: RunPlan) -> Option:
    return Option(
        plugin=plan.plugin.name,
        mesh=plan.mesh,
        layout=layout_of(plan.plugin, plan.batch, optim=plan.optim),
        checkpointing=plan.train.activation_checkpointing,
        memory=plan.memory,
        peak=plan.peak,
        time=plan.time,
        verdict=plan.peak.verdict(plan.cluster.memory_bytes),
    )
