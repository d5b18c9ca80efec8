"""Predicted time of a step. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from colotrain.planner.communication import Traffic, owned_matrices, traffic
from colotrain.planner.groups import Group, find
from colotrain.planner.hardware import Hardware
from colotrain.planner.layout import Layout
from colotrain.spec.pipeline_schedule import pipeline_time
from colotrain.spec.plan import Prediction
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.survey import Survey, Trace

COMMUNICATION_COSTS = (
    "gathered_byte_s",
    "reduced_byte_s",
    "replicated_byte_s",
    "gathered_whole_s",
    "reduced_whole_s",
    "collective_s",
)
"""Fields of `Costs` for collectives."""


Part = tuple[Layout, Survey, Trace]
"""A pipeline stage; the whole model where there is one."""


def step_time(
    stages: Sequence[Part],
    hardware: Hardware,
    *,
    shares: Sequence[Sequence[float]] = (),
    tokens_per_step: int,
    flops_per_token: float,
    world_size: int,
) -> Prediction:
    """Predict a step's time, and the share of it that each pipeline stage waits for others.

    `shares` are the parts of a stage's time that its chunks take. MFU counts the model's FLOPs
    without recomputation (PaLM, Chowdhery et al. 2022).
    """
    own = [own_time(part, hardware) for part in stages]
    one_more = [own_time(_longer(part), hardware) for part in stages]
    each = [longer - busy for longer, busy in zip(one_more, own, strict=True)]
    steps = stages[0][0].accumulation_steps
    after = max(busy - steps * one for busy, one in zip(own, each, strict=True))
    of_chunks = [
        [one * share for share in of_stage]
        for one, of_stage in zip(each, shares or [[1.0]] * len(stages), strict=True)
    ]
    step_s = own[0] if len(stages) == 1 else pipeline_time(of_chunks, steps) + after
    waits = [1 - busy / step_s for busy in own] if len(stages) > 1 else []
    tokens_per_s = tokens_per_step / step_s
    ideal = world_size * hardware.peak_flops
    mfu = flops_per_token * tokens_per_s / ideal if ideal else 0.0
    return Prediction(step_s=step_s, tokens_per_s=tokens_per_s, mfu=mfu, waits=tuple(waits))


def chunk_shares(trace: Trace, chunk_of: Mapping[str, int], chunks: int) -> list[float]:
    """Return the part of a stage's FLOPs that is in each of its chunks."""
    flops = [0.0] * chunks
    for segment in trace.segments if chunks > 1 else ():
        work = segment.work
        at = chunk_of.get(segment.block or "", 0)
        flops[at] += work.matmul_flops + work.attention_flops
    whole = sum(flops)
    return [one / whole for one in flops] if whole else [1 / chunks] * chunks


def _longer(part: Part) -> Part:
    """Return a stage with one more micro-batch."""
    layout, survey, trace = part
    steps = layout.accumulation_steps + 1
    return dataclasses.replace(layout, accumulation_steps=steps), survey, trace


def own_time(part: Part, hardware: Hardware) -> float:
    """Return the seconds of a stage: computation, collectives not hidden by it, the optimizer."""
    layout, survey, trace = part
    amounts = amounts_of(layout, survey, trace)
    spent = {name: amount * getattr(hardware.costs, name) for name, amount in amounts.items()}
    communicating = sum(spent.pop(name) for name in COMMUNICATION_COSTS)
    attention = spent.pop("attention_byte_s")  # waited for in every layer, and after the last
    after = spent.pop("element_s") + spent.pop("step_s")
    if hardware.overlaps:
        # the host launches the kernels, and is the limit where it is slower than the GPU
        host = spent.pop("op_s") + spent.pop("repeated_op_s")
        computing = max(sum(spent.values()), host)
        exposed = communicating * _exposed_share(layout, traffic(layout, survey, trace))
        return max(computing, communicating) + exposed + attention + after
    return sum(spent.values()) + communicating + attention + after


def amounts_of(layout: Layout, survey: Survey, trace: Trace) -> dict[str, float]:
    """Amount of each kind of work in a step, by the names of `Costs`."""
    sent, num = traffic(layout, survey, trace), layout.accumulation_steps
    is_cpu = layout.device == "cpu"
    works = [segment.work for segment in trace.segments]
    works += trace.passes_before * [s.work for s in trace.segments if s.phase == "forward"]
    groups = find(survey, trace, layout).values()
    moved = num * sum(work.moved_bytes for work in works)
    return {
        "flop_s": num * sum(work.matmul_flops for work in works)
        + owned_matrices(layout, survey).flops,
        "attention_flop_s": num * sum(work.attention_flops for work in works),
        "byte_s": moved + (0 if is_cpu else _cast_bytes(layout, list(groups), sent)),
        "op_s": num * sum(work.num_ops for work in works),
        "repeated_op_s": num * sum(work.num_repeated for work in works),
        "gathered_byte_s": sent.gathered_bytes
        + sent.owned_bytes
        + (0 if is_cpu else sent.passed_bytes),
        "reduced_byte_s": sent.reduced_bytes,
        "replicated_byte_s": sent.replicated_bytes,
        "gathered_whole_s": sent.gathered_whole
        + (sent.inner_whole + sent.summed_whole + sent.passed_bytes if is_cpu else 0.0),
        "reduced_whole_s": sent.reduced_whole,
        "collective_s": (sent.calls if is_cpu else sent.gathers + sent.reductions)
        + sent.inner_calls
        + sent.owned_calls
        + sent.summed_calls,
        "attention_byte_s": sent.inner_bytes + sent.summed_bytes,
        "element_s": sum(group.trained_shard_numel for group in groups),
        "step_s": 1.0,
    }


def _cast_bytes(layout: Layout, groups: Sequence[Group], sent: Traffic) -> float:
    """Bytes that one GPU reads and writes to cast parameters, and to add gradients, in a step.

    With several ranks the cost of collectives includes this. What is frozen is cast once for all.
    """
    gathered = sum(group.gathered_bytes for group in groups)
    if layout.shard > 1 or not PRECISIONS[layout.precision].is_cast or not gathered:
        return 0.0
    trained = sum(group.trained_bytes for group in groups)  # in fp32, as they are added
    uses, steps = sent.gathered_whole / gathered, layout.accumulation_steps
    cast = 1.5 * trained * uses  # each is read in fp32 and written in half as many bytes
    return cast + 1.5 * trained * steps + trained * (steps - 1)  # the first sum is not read


def _exposed_share(layout: Layout, sent: Traffic) -> float:
    """Share of collectives that nothing hides: a micro-batch's first gather and last reduction."""

    collectives = sent.gathers + sent.reductions
    return min(1.0, 2 * layout.accumulation_steps / collectives) if collectives else 0.0
