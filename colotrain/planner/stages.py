"""Pipeline stages: checks, the number of blocks of each, and its part of the model.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from colotrain.config.schema import Config
from colotrain.errors import Problem
from colotrain.planner.scale import Scale
from colotrain.spec.axes import MeshPlan
from colotrain.spec.pipeline_schedule import bubble
from colotrain.spec.plan import BatchPlan, Recompute
from colotrain.spec.sequence import BlockSequence, Costs, balance
from colotrain.spec.survey import Survey, Trace

Traces = Callable[[Recompute, int], Trace | None]
"""(checkpointing, samples) → trace of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank of one pipeline stage has of the model: all of it where there are no others."""

    number: int = 0
    survey: Survey
    """Its parameters; those that are unfrozen later count as trained."""
    traces: Traces
    gradients_sent: int = 0
    """Chunks of the stage that send gradients back."""
    chunk_of: dict[str, int] = field(default_factory=dict)
    """Block → position of its chunk among the stage's; "" → that of what is in no block."""


def plan_stages(
    settings: Config,
    scale: Scale,
    survey: Survey | None,
    find: Callable[[], BlockSequence] | None,
    problems: list[Problem],
) -> Scale:
    """Return `scale` with the split of the model's blocks; problems are appended."""
    pp = scale.mesh.pp
    if pp == 1:
        return scale
    problems += _check_chunks(settings)
    if survey is None or find is None or problems:
        return scale
    sequence = find()
    split = _split(settings, scale.mesh, survey, sequence, problems)
    if problems:
        return scale
    mesh = dataclasses.replace(scale.mesh, pp_split=split)
    return dataclasses.replace(scale, mesh=mesh, sequence=sequence)


def _check_chunks(settings: Config) -> Iterator[Problem]:
    """Problem of a number of chunks that the schedule cannot have."""
    schedule, chunks = settings.mesh.pp_schedule, settings.mesh.pp_chunks
    if schedule == "interleaved" and chunks is not None and chunks < 2:
        expected = "2 or more under mesh.pp_schedule=interleaved"
        fix = "remove it, or set mesh.pp_schedule=1f1b"
        yield Problem(key="mesh.pp_chunks", value=chunks, expected=expected, fix=fix)


def _split(
    settings: Config,
    mesh: MeshPlan,
    survey: Survey,
    sequence: BlockSequence,
    problems: list[Problem],
) -> tuple[int, ...]:
    """Return the number of blocks of each stage or chunk, or append the problem with it."""
    num, parts = len(sequence.blocks), mesh.pp * mesh.pp_chunks
    asked = settings.mesh.pp_split
    if sequence.against:
        expected, fix = (
            f"1: this model is no sequence of blocks: {sequence.against}",
            "set mesh.pp=1",
        )
        problems.append(Problem(key="mesh.pp", value=mesh.pp, expected=expected, fix=fix))
    elif num < mesh.pp:
        expected, fix = f"at most {num}, the number of the model's blocks", f"set mesh.pp={num}"
        problems.append(Problem(key="mesh.pp", value=mesh.pp, expected=expected, fix=fix))
    elif num < parts:
        expected = f"at most {num // mesh.pp}, as {mesh.pp} stages share out {num} blocks"
        can = num // mesh.pp >= 2
        fix = f"set mesh.pp_chunks={num // mesh.pp}" if can else "set mesh.pp_schedule=1f1b"
        problems.append(
            Problem(key="mesh.pp_chunks", value=mesh.pp_chunks, expected=expected, fix=fix)
        )
    elif asked and (len(asked) != parts or sum(asked) != num or min(asked) < 1):
        expected = f"{parts} numbers of 1 or more, whose sum is {num}, the number of blocks"
        fix = f"for example mesh.pp_split={_listed(balance(costs(survey, sequence), parts))}"
        problems.append(Problem(key="mesh.pp_split", value=list(asked), expected=expected, fix=fix))
    else:
        return asked or balance(costs(survey, sequence), parts)
    return ()


def _listed(split: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, split))}]"


def costs(survey: Survey, sequence: BlockSequence) -> Costs:
    """Return the sizes of the matrices that a token is multiplied with."""
    of_block = dict.fromkeys(sequence.blocks, 0)
    after = 0
    for parameter in survey.parameters:
        if len(parameter.shape) < 2:
            continue
        block = next((b for b in of_block if parameter.name.startswith(f"{b}.")), None)
        if block is not None:
            of_block[block] += parameter.numel
        elif parameter.name in sequence.after:
            after += parameter.numel
    return Costs(blocks=tuple(of_block.values()), after=after)


def bubble_warning(scale: Scale, batch: BatchPlan) -> Iterator[str]:
    """Warning of fewer micro-batches than stages, of which some then wait most of the time."""
    pp, steps = scale.mesh.pp, batch.accumulation_steps
    if steps < pp:
        share = bubble(pp, steps, scale.mesh.pp_chunks)
        yield (
            f"mesh.pp={pp}: with accumulation {steps} each stage waits for {share:.0%} of a step; "
            f"a smaller train.micro_batch, or a larger train.global_batch, gives {pp} or more"
        )


def divide(whole: Stage, scale: Scale) -> tuple[Stage, ...]:
    """Return the stages of a model, of which `whole` is all."""
    if scale.mesh.pp == 1:
        return (whole,)
    return tuple(_stage(whole, scale, number) for number in range(scale.mesh.pp))


def _stage(whole: Stage, scale: Scale, number: int) -> Stage:
    def traces(recompute: Recompute, samples: int) -> Trace | None:
        trace = whole.traces(recompute, samples)
        return None if trace is None else _trace_of(trace, scale, number)

    return Stage(
        number=number,
        survey=_survey_of(whole.survey, scale, number),
        traces=traces,
        gradients_sent=_gradients_sent(whole.survey, scale, number),
        chunk_of=_chunk_of(scale, number),
    )


def _gradients_sent(survey: Survey, scale: Scale, stage: int) -> int:
    """Return how many chunks of a stage send gradients back: those after a trained parameter."""
    split, sequence = scale.mesh.pp_split, scale.sequence
    trained = [p.name for p in survey.parameters if p.frozen_by is None]
    first = min((sequence.chunks_of(name, split)[0] for name in trained), default=len(split))
    return sum(first < chunk for chunk in scale.mesh.chunks_of(stage))


def _chunk_of(scale: Scale, stage: int) -> dict[str, int]:
    """Return block → position of its chunk among those of a stage; "" → that beside the blocks."""
    mesh, sequence = scale.mesh, scale.sequence
    found = {
        block: position
        for position, chunk in enumerate(mesh.chunks_of(stage))
        for block in sequence.blocks_of(chunk, mesh.pp_split)
    }
    return {**found, "": 0 if stage == 0 else mesh.pp_chunks - 1}


def _survey_of(survey: Survey, scale: Scale, stage: int) -> Survey:
    """Return the model with the parameters that one stage holds."""
    mesh, sequence = scale.mesh, scale.sequence
    held = tuple(
        p
        for p in survey.parameters
        if stage in sequence.stages_of(p.name, mesh.pp_split, mesh.pp_chunks)
    )
    return dataclasses.replace(survey, parameters=held)


def _trace_of(trace: Trace, scale: Scale, stage: int) -> Trace:
    """Return what one stage computes of a micro-batch: its blocks, and what is beside them.

    What another stage would free of this stage's is freed with the last segment.
    """
    blocks, own = scale.sequence.blocks, _chunk_of(scale, stage)
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
