"""Memory and time of pipeline stages, each with its part of the model. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from colotrain.config.schema import Plugin
from colotrain.planner.advise import Option
from colotrain.planner.plugin import PlanningContext, decide
from colotrain.planner.scale import Scale
from colotrain.spec.plan import PluginPlan, Recompute
from colotrain.spec.survey import Survey, Trace


def of_fullest_stage(
    asked: Plugin, context: PlanningContext
) -> tuple[PlanningContext, PluginPlan, Option]:
    """Decide on the plugin; return the stage that needs most memory under it, and that memory."""
    contexts = [*each_stage(context)]
    plugin, option = decide(asked, contexts[0])
    if context.scale.mesh.pp == 1:
        return context, plugin, option
    options = [own.own_option(plugin) for own in contexts]
    by_stage = tuple(option.memory.total for option in options)
    sent = tuple(sum(own.layout(plugin).passed_bytes) for own in contexts)
    index = by_stage.index(max(by_stage))
    fullest = dataclasses.replace(contexts[index], bytes_of_stages=by_stage, sent_by_stages=sent)
    return fullest, plugin, options[index]


def each_stage(context: PlanningContext) -> Iterator[PlanningContext]:
    """Yield the context of each stage; `context` itself where there are no stages."""
    scale, space = context.scale, context.search_space
    if scale.mesh.pp == 1:
        yield context
        return
    own_spaces = []
    for stage in range(scale.mesh.pp):

        def traces(recompute: Recompute, samples: int, stage: int = stage) -> Trace | None:
            whole = space.traces(recompute, samples)
            return None if whole is None else trace_of(whole, scale, stage)

        own_spaces.append(
            dataclasses.replace(
                space,
                survey=survey_of(space.survey, scale, stage),
                traces=traces,
                chunk_of=chunk_of(scale, stage),
                gradients_sent=gradients_sent(space.survey, scale, stage),
            )
        )
    for stage, own in enumerate(own_spaces):
        own = dataclasses.replace(own, stages=tuple(own_spaces))
        yield dataclasses.replace(context, search_space=own, stage=stage)


def gradients_sent(survey: Survey, scale: Scale, stage: int) -> int:
    """Return how many chunks of a stage send gradients back: those after a trained parameter."""
    split, sequence = scale.mesh.pp_split, scale.sequence
    trained = [p.name for p in survey.parameters if p.frozen_by is None]
    first = min((sequence.chunks_of(name, split)[0] for name in trained), default=len(split))
    return sum(first < chunk for chunk in scale.mesh.chunks_of(stage))


def chunk_of(scale: Scale, stage: int) -> dict[str, int]:
    """Return block → position of its chunk among those of a stage; "" → that beside the blocks."""
    mesh, sequence = scale.mesh, scale.sequence
    found = {
        block: position
        for position, chunk in enumerate(mesh.chunks_of(stage))
        for block in sequence.blocks_of(chunk, mesh.pp_split)
    }
    return {**found, "": 0 if stage == 0 else mesh.pp_chunks - 1}


def survey_of(survey: Survey, scale: Scale, stage: int) -> Survey:
    """Return the model with the parameters that one stage holds."""
    mesh, sequence = scale.mesh, scale.sequence
    held = tuple(
        p
        for p in survey.parameters
        if stage in sequence.stages_of(p.name, mesh.pp_split, mesh.pp_chunks)
    )
    return dataclasses.replace(survey, parameters=held)


def trace_of(trace: Trace, scale: Scale, stage: int) -> Trace:
    """Return what one stage computes of a micro-batch: its blocks, and what is beside them.

    What another stage would free of this stage's is freed with the last segment.
    """
    blocks, own = scale.sequence.blocks, chunk_of(scale, stage)
    at_blocks = [i for i, s in enumerate(trace.segments) if s.block == blocks[0]]
    first, last = at_blocks[0], at_blocks[-1]  # its first forward, and its last backward
    kept = []
    for index, segment in enumerate(trace.segments):
        around = 0 if index < first or index > last else scale.mesh.pp - 1
        if segment.block in own if segment.block else around == stage:
            kept.append(segment)
    alive: dict[int, None] = {}
    for event in (event for segment in kept for event in segment.events):
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(-1 - event, None)
    left = tuple(-1 - number for number in alive if number not in trace.gradients)
    if kept and left:
        kept[-1] = dataclasses.replace(kept[-1], events=(*kept[-1].events, *left))
    return dataclasses.replace(trace, segments=tuple(kept))
