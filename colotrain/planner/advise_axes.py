"""Other axes of the mesh (`mesh.cp`, `mesh.tp`) as alternatives to a plan.

Each needs a trace of its own, for ranks hold parts of the model's layers, so they are tried at the
smallest micro-batch alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from colotrain.planner.advise import Option
from colotrain.planner.layout import layout_of
from colotrain.planner.plugin import PlanningContext
from colotrain.spec.plan import RunPlan
from colotrain.spec.survey import Survey

Changes = dict[str, Any]
"""Settings by dotted key."""
LEAST: Changes = {
    "plugin.name": "zero3",
    "train.micro_batch": 1,
    "train.activation_checkpointing": "full",
}
"""Settings that need the least memory without offloading."""
SMALL: Changes = {"plugin.name": "auto", "train.micro_batch": 1}


def sizes_of_axes(survey: Survey, plan: RunPlan) -> dict[str, list[int]]:
    """The sizes of each axis that the model allows and a node has ranks for, 1 included."""
    procs, how = plan.cluster.procs_per_node, survey.divisions
    sizes = [size for size in range(1, procs + 1) if procs % size == 0]
    cps = sizes if survey.divides_sequences else [1]
    return {"mesh.cp": cps, "mesh.tp": [n for n in sizes if n == 1 or (how and how.allows(n))]}


def other_meshes(context: PlanningContext, plan: RunPlan) -> Iterator[Option]:
    """The plan with every other product of the axes that fits a node, each under its best plugin.

    With the plan's recomputation; where that does not surely fit, with full recomputation.
    """
    sizes, own = sizes_of_axes(context.search_space.survey, plan), plan.mesh
    products = [(cp, tp) for cp in sizes["mesh.cp"] for tp in sizes["mesh.tp"]]
    for cp, tp in products:
        other = dataclasses.replace(own, cp=cp, tp=tp)
        unit = other.unit(plan.cluster.nodes)
        if other == own or plan.cluster.procs_per_node % unit:
            continue
        changes = SMALL | {"mesh.cp": cp, "mesh.tp": tp}
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
