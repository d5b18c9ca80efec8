"""What would make a plan fit that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from colotrain.config.plugin import Situation
from colotrain.config.sizes import format_size
from colotrain.estimate.advise import largest_micro_batch, ranks_needed
from colotrain.estimate.layout import Layout
from colotrain.plan import RECOMPUTE, RunPlan
from colotrain.plugins import ROWS


def remedy(situation: Situation, plan: RunPlan) -> str:
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
        if question.can(more) and question.option("", now, checkpointing=more).fits:
            yield f"set train.activation_checkpointing={more}"
            break
    for name in ("zero2", "zero3"):
        if name == plan.plugin.name:
            continue
        layout = _layout(name, situation)
        if question.option(name, layout, checkpointing=recompute).fits:
            yield f"take plugin={name}"
        elif question.option(name, _one(layout), checkpointing="blocks").fits:
            yield (
                f"take plugin={name} with train.micro_batch=1 train.activation_checkpointing=blocks"
            )


def _layout(name: str, situation: Situation) -> Layout:
    assert name in ROWS
    return situation.layout(situation.lay_out(name))


def _one(layout: Layout) -> Layout:
    steps = layout.accumulation_steps * layout.micro_batch
    return dataclasses.replace(layout, micro_batch=1, accumulation_steps=steps)
