"""Checks of pipeline stages, and the number of blocks of each. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from colotrain.config.schema import Config
from colotrain.errors import Problem
from colotrain.planner.scale import Scale
from colotrain.spec.axes import MeshPlan
from colotrain.spec.pipeline_schedule import bubble
from colotrain.spec.plan import BatchPlan
from colotrain.spec.sequence import BlockSequence, Costs, balance
from colotrain.spec.survey import Survey


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
