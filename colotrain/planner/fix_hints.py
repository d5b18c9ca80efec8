"""Warnings about a plan's memory, and settings that would make the plan fit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colotrain.config.schema import Plugin
from colotrain.errors import ColotrainError
from colotrain.planner.advise import LEAST, Changes, can, largest_micro_batch, sizes_of_axes
from colotrain.planner.budget import existing
from colotrain.planner.context import PlanningContext
from colotrain.planner.layout import Layout
from colotrain.planner.memory import predict
from colotrain.planner.plugin import plan_plugin
from colotrain.rundir import OFFLOAD
from colotrain.spec.plan import RECOMPUTE, RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.quantities import format_size

MOST_HINTS = 3


def memory_warnings(context: PlanningContext, plan: RunPlan) -> Iterator[str]:
    """Warnings about memory that may not suffice, and about offloading to disk because of it."""
    capacity, peak, budget = plan.cluster.memory_bytes, plan.peak, plan.plugin.budget
    if budget is not None and budget.disk_path == OFFLOAD:
        room, space = format_size(budget.host_bytes), format_size(budget.disk_bytes)
        yield (
            f"memory: what {room} per rank cannot hold is offloaded to disk, in the run's own "
            f"folder ({OFFLOAD}/, at most {space} per rank); plugin.disk_path=none forbids it"
        )
    if (
        budget is not None
        and plan.cluster.device == "cpu"
        and plan.memory.total > budget.host_bytes
    ):
        yield (
            f"plugin.budget.host: {format_size(budget.host_bytes)} are less than the "
            f"{format_size(plan.memory.total)} that a rank needs at least, and will be exceeded"
        )
    named = budget.disk_path if budget is not None else None
    if named not in (None, OFFLOAD) and not Path(str(named)).exists():
        yield (
            f"plugin.disk_path={named}: is not there yet, and would be made on the disk of "
            f"{existing(Path(str(named)))}"
        )
    if _has_larger_pass(context, plan):
        yield (
            f"memory: the peak of {format_size(plan.memory.total)} per rank is that of the "
            "teacher's pass before the first step, in which every rank holds the teacher whole"
        )
    if _has_larger_build(context, plan):
        yield (
            f"memory: the peak of {format_size(plan.memory.total)} per rank is that of the start, "
            "where every rank makes the model whole, as plain torch does, and keeps its shard; "
            "model.deferred_init=true needs less if the model's init_weights() sets every parameter"
        )
    range_ = f"{format_size(peak.low)} to {format_size(peak.high)}"
    if peak.verdict(capacity) == "tight":
        yield (
            f"memory: {plan.plugin.name} needs {range_} per rank, of {format_size(capacity)}, and "
            "may not fit: a run that nears the limit ends by itself. To be sure, "
            f"{fix_hints(context, plan)}"
        )
        return
    free, procs = context.machine.host_free_bytes, plan.cluster.procs_per_node
    is_here = capacity == context.machine.host_memory_bytes // procs
    if plan.cluster.device == "cpu" and is_here and free and peak.high * procs > free:
        yield (
            f"memory: {procs} ranks need {range_} each, and {format_size(free)} of this machine "
            "are free now; end other programs, or the run may have to end by itself"
        )


def _has_larger_pass(context: PlanningContext, plan: RunPlan) -> bool:
    """Whether a pass before the first step needs more memory than training."""
    stage, layout = context.stage, context.layout(plan.plugin)
    if context.before is None:
        return False
    trace = stage.traces(plan.train.activation_checkpointing, layout.micro_batch)
    training = predict(layout, stage.survey, trace).breakdown.total
    return context.before(layout).breakdown.total > training


def _has_larger_build(context: PlanningContext, plan: RunPlan) -> bool:
    """Whether making the whole model on every rank needs more memory than training."""
    stage, layout = context.stage, context.layout(plan.plugin)
    if not stage.survey.built_whole:
        return False
    trace = stage.traces(plan.train.activation_checkpointing, layout.micro_batch)
    shards_only = dataclasses.replace(stage.survey, built_whole=False)
    training = predict(layout, shards_only, trace).breakdown.total
    return training < predict(layout, stage.survey, trace).breakdown.total


def fix_hints(context: PlanningContext, plan: RunPlan) -> str:
    """The smallest changes of settings that make `plan` fit, or the least memory it needs.

    Every change was planned on the same machine, and fits there.
    """
    found: list[Changes] = []
    for changes in _changes(context, plan):
        is_new = not any(known.keys() <= changes.keys() for known in found)
        if len(found) < MOST_HINTS and is_new and context.verdict(changes) == "yes":
            found.append(changes)
    if not found:
        found += _larger_groups(context, plan)
    if found:
        return "set " + " or ".join(map(_shown, found))
    for nodes in (plan.cluster.nodes << n for n in range(1, 11)):
        procs = plan.cluster.procs_per_node
        more: Changes = {"cluster.nodes": nodes, "cluster.procs_per_node": procs} | LEAST
        if ROWS[plan.plugin.name].packed:
            more["plugin.name"] = plan.plugin.name
        if plan.batch.global_batch < nodes * procs:
            more["train.global_batch"] = nodes * procs
        if context.verdict(more) == "yes":
            return f"nothing makes it fit here; {nodes} such machines would do: {_shown(more)}"
    zero3 = _one(context.layout(plan_plugin("zero3", Plugin(), context)))
    option = context.option_of("zero3", zero3, checkpointing="full")
    need = format_size(option.memory.total)
    least = f"even plugin=zero3 with micro-batches of 1 needs {need} per rank"
    return f"use a smaller model or more memory: {least}"


def changed_plans(
    config: dict[str, Any], plan: Callable[[dict[str, Any]], tuple[RunPlan, PlanningContext]]
) -> Callable[[Changes], RunPlan | None]:
    """Function that plans `config` with changed settings; None where they are refused."""

    def changed_plan(changes: Changes) -> RunPlan | None:
        try:
            return plan(with_changes(config, changes))[0]
        except ColotrainError:
            return None

    return changed_plan


def with_changes(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of `config` with changed settings."""
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed[section] = {**(changed.get(section) or {}), name: value}
    return changed


def _shown(changes: Changes) -> str:
    text = " ".join(f"{key.removesuffix('.name')}={value}" for key, value in changes.items())
    return f"{text} (accumulation keeps the global batch)" if "train.micro_batch" in text else text


def _changes(context: PlanningContext, plan: RunPlan) -> Iterator[Changes]:
    """Changes that may help on this machine, the smallest first."""
    recompute, share = plan.train.activation_checkpointing, plan.batch.share
    size = largest_micro_batch(context, context.layout(plan.plugin), checkpointing=recompute)
    if size:
        yield {"train.micro_batch": max(n for n in range(1, size + 1) if share % n == 0)}
    for more in RECOMPUTE[RECOMPUTE.index(recompute) + 1 :]:
        if can(context, more):
            yield {"train.activation_checkpointing": more}
    others = [name for name in ("zero2", "zero3", "gemini") if name != plan.plugin.name]
    yield from ({"plugin.name": name} for name in others)
    if plan.train.precision == "fp32":
        yield {"train.precision": "bf16"}
    gemini, budget = {"plugin.name": "gemini"}, plan.plugin.budget
    if ROWS[plan.plugin.name].packed and not (budget and budget.disk_path):
        gemini |= {"plugin.disk_path": "auto"}
        yield gemini
    for least in (LEAST, LEAST | gemini):
        yield least
        if plan.train.precision == "fp32":
            yield least | {"train.precision": "bf16"}
    if plan.cluster.device == "cpu" and plan.cluster.procs_per_node > 1:
        yield LEAST | gemini | {"cluster.procs_per_node": 1}


def _larger_groups(context: PlanningContext, plan: RunPlan) -> Iterator[Changes]:
    """The smallest group of ranks that fits by dividing tokens; so for matrices, and for experts.

    They come last, for such ranks exchange activations inside every layer. Where even the largest
    group does not fit, the others are not traced.
    """
    mesh, procs, nodes = plan.mesh, plan.cluster.procs_per_node, plan.cluster.nodes
    for key, sizes in sizes_of_axes(context.stage.survey, plan).items():
        axis, own = key.removeprefix("mesh."), mesh.above_one.get(key, 1)
        larger = {n: dataclasses.replace(mesh, **Changes({axis: n})) for n in sizes if n > own}
        fitting = [n for n, other in larger.items() if procs % other.unit(nodes) == 0]
        groups = [LEAST | {key: n} for n in fitting]
        if groups and context.verdict(groups[-1]) == "yes":
            yield next(changes for changes in groups if context.verdict(changes) == "yes")


def _one(layout: Layout) -> Layout:
    steps = layout.accumulation_steps * layout.micro_batch
    return dataclasses.replace(layout, micro_batch=1, accumulation_steps=steps)
