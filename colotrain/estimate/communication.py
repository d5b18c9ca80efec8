"""What a plan sends in a step. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from colotrain.estimate.memory import shard_numel
from colotrain.plan import BatchPlan, ParameterInfo, PluginPlan, Survey

REDUCE_BYTES = 4
"""Gradients are reduced in fp32 whenever computing is in half precision."""
COMPUTE_BYTES = {"fp32": None, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one step. Bytes are what one rank sends, with ring algorithms."""

    gathers: int
    reductions: int
    reduced: str
    """`once a step` or `every micro-batch`."""
    bytes_per_step: int


def traffic(plugin: PluginPlan, survey: Survey, batch: BatchPlan, precision: str) -> Traffic:
    """Collectives and bytes of a step under `plugin`.

    A ring of n ranks sends (n - 1) / n of the whole per all-gather or reduce-scatter, and twice
    that per all-reduce (Patarasuk and Yuan 2009). Kept parameters are gathered once a step; freed
    ones for each forward and again for each backward, but for the root's, which stay in between.
    """
    shard = plugin.mesh[-1]
    replicas = plugin.mesh[0] if len(plugin.mesh) > 1 else 1
    groups: dict[str, list[ParameterInfo]] = {}
    for parameter in survey.parameters:
        groups.setdefault(parameter.group, []).append(parameter)
    steps = batch.accumulation_steps
    reductions = steps if plugin.gradients == "sharded" else 1
    sent, num_gathers, num_reductions = 0.0, 0, 0
    for name, members in groups.items():
        uses = 1 if plugin.parameters_live == "step" else steps * (2 if name else 1)
        gathered, reduced = _bytes(members, shard, COMPUTE_BYTES[precision])
        sent += uses * gathered * (shard - 1) / shard
        if reduced:
            sent += reductions * reduced * (shard - 1) / shard
            sent += 2 * (replicas - 1) / replicas * reduced / shard
            num_reductions += reductions
        num_gathers += uses
    return Traffic(
        gathers=num_gathers if shard > 1 else 0,
        reductions=num_reductions if shard > 1 else 0,
        reduced="every micro-batch" if plugin.gradients == "sharded" else "once a step",
        bytes_per_step=round(sent),
    )


def _bytes(members: list[ParameterInfo], shard: int, compute: int | None) -> tuple[int, int]:
    """A group's bytes when gathered, and when its gradients are reduced (padding included)."""
    gathered = sum(shard_numel(p, shard) * shard * (compute or p.itemsize) for p in members)
    trained = [p for p in members if p.frozen_by is None]
    width = REDUCE_BYTES if compute else None
    return gathered, sum(shard_numel(p, shard) * shard * (width or p.itemsize) for p in trained)
