"""What a plan's memory gives reason to warn of, and what would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from colotrain.config.plugin import Situation
from colotrain.config.sizes import format_size
from colotrain.estimate.advise import Option, largest_micro_batch, ranks_needed
from colotrain.estimate.layout import Layout
from colotrain.plan import RECOMPUTE, RunPlan
from colotrain.plugins import ROWS
from colotrain.rundir import OFFLOAD


def memory_warnings(situation: Situation, plan: RunPlan) -> Iterator[str]:
    """What may not fit, and what rests on disk because memory might not suffice."""
    capacity, peak, budget = plan.cluster.memory_bytes, plan.peak, plan.plugin.budget
    if budget is not None and budget.disk_path == OFFLOAD:
        room, space = format_size(budget.host_bytes), format_size(budget.disk_bytes)
        yield (
            f"memory: what {room} per rank cannot hold rests on disk, in the run's own folder "
            f"({OFFLOAD}/, at most {space} per rank); plugin.disk_path=none forbids it"
        )
    range_ = f"{format_size(peak.low)} to {format_size(peak.high)}"
    if peak.verdict(capacity) == "tight":
        yield (
            f"memory: {plan.plugin.name} needs {range_} per rank, of {format_size(capacity)}, and "
            "may not fit: a run that nears the limit ends by itself. To be sure, "
            f"{fix_hints(situation, plan)}"
        )
        return
    free, procs = situation.machine.host_free_bytes, plan.cluster.procs_per_node
    is_here = capacity == situation.machine.host_memory_bytes // procs
    if plan.cluster.device == "cpu" and is_here and free and peak.high * procs > free:
        yield (
            f"memory: {procs} ranks need {range_} each, and {format_size(free)} of this machine "
            "are free now; end other programs, or the run may have to end by itself"
        )


def fix_hints(situation: Situation, plan: RunPlan) -> str:
    """The nearest changes that make `plan` fit, as settings, or what it would take at least."""
    found = list(dict.fromkeys(_changes(situation, plan)))
    if found:
        return " or ".join(found[:3])
    layout = _layout("zero3", situation)
    ranks = ranks_needed(situation.question, layout, checkpointing="blocks")
    room = format_size(plan.cluster.memory_bytes)
    if ranks is not None:
        return f"plugin=zero3 with micro-batches of 1 would fit on {ranks} ranks of {room}"
    option = situation.question.option("zero3", _one(layout), checkpointing="blocks")
    need = format_size(option.memory.total)
    least = f"even plugin=zero3 with micro-batches of 1 needs {need}"
    return f"use a smaller model or more memory: {least}"


def _changes(situation: Situation, plan: RunPlan) -> Iterator[str]:
    question, recompute = situation.question, plan.train.activation_checkpointing
    now = situation.layout(plan.plugin)
    size = largest_micro_batch(question, now, checkpointing=recompute)
    share = question.global_batch // question.world_size
    if size:
        fits = max(n for n in range(1, size + 1) if share % n == 0)
        yield f"set train.micro_batch={fits} (accumulation keeps the global batch)"
    for more in RECOMPUTE[RECOMPUTE.index(recompute) + 1 :]:
        if question.can(more) and _fits(question.option("", now, checkpointing=more)):
            yield f"set train.activation_checkpointing={more}"
            break
    for name in ("zero2", "zero3"):
        if name == plan.plugin.name:
            continue
        layout = _layout(name, situation)
        if _fits(question.option(name, layout, checkpointing=recompute)):
            yield f"take plugin={name}"
        elif _fits(question.option(name, _one(layout), checkpointing="blocks")):
            yield (
                f"take plugin={name} with train.micro_batch=1 train.activation_checkpointing=blocks"
            )


def _fits(option: Option) -> bool:
    return option.verdict == "yes"


def _layout(name: str, situation: Situation) -> Layout:
    assert name in ROWS
    return situation.layout(situation.lay_out(name))


def _one(layout: Layout) -> Layout:
    steps = layout.accumulation_steps * layout.micro_batch
    return dataclasses.replace(layout, micro_batch=1, accumulation_steps=steps)
