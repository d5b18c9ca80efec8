"""A plan on another number of nodes: the same global batch, so the same optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from colotrain.errors import ColotrainError
from colotrain.spec.plan import RunPlan


def resize(plan: RunPlan, nodes: int) -> RunPlan:
    """`plan` on `nodes` nodes, with accumulation and mesh computed anew.

    Raises `ColotrainError` where the global batch cannot be divided among so many ranks.
    """
    if nodes == plan.cluster.nodes:
        return plan
    procs, batch = plan.cluster.procs_per_node, plan.batch
    world = nodes * procs
    together = plan.mesh.together
    if nodes not in reachable(batch.global_batch, batch.micro_batch, [nodes], procs, together):
        least, most = plan.elastic.min_nodes, max(plan.elastic.max_nodes, nodes)
        who = _named(world // together, together) if world % together == 0 else f"{world} ranks"
        wanted = range(least, most + 1)
        sizes = reachable(batch.global_batch, batch.micro_batch, wanted, procs, together)
        raise ColotrainError(
            f"{nodes} nodes: a global batch of {batch.global_batch} cannot be shared out among "
            f"{who} in micro-batches of {batch.micro_batch}",
            f"numbers of nodes that can: {', '.join(map(str, sizes)) or 'none'}",
        )
    groups = world // together
    steps = batch.global_batch // (batch.micro_batch * groups)
    parts = world // (plan.mesh.tp * plan.mesh.pp)
    shard = plan.plugin.dp_shard if plan.plugin.is_hybrid else parts
    if parts % shard:
        raise ColotrainError(
            f"{nodes} nodes: {_named(parts, plan.mesh.tp)} cannot be divided into replicas of "
            f"{shard}",
            f"set plugin.shard_size to a divisor of {procs}",
        )
    mesh = (parts // shard, shard) if plan.plugin.is_hybrid else (parts,)
    return dataclasses.replace(
        plan,
        world_size=world,
        cluster=dataclasses.replace(plan.cluster, nodes=nodes),
        plugin=dataclasses.replace(plan.plugin, mesh=mesh),
        batch=dataclasses.replace(batch, accumulation_steps=steps, data_parallel=groups),
    )


def _named(groups: int, ranks: int) -> str:
    return f"{groups} ranks" if ranks == 1 else f"{groups} groups of {ranks} ranks"


def reachable(
    global_batch: int, micro_batch: int, candidates: Iterable[int], procs: int, together: int
) -> list[int]:
    """The numbers of nodes among `candidates` that divide the global batch evenly.

    Each node has `procs` ranks, and `together` ranks work on the same samples.
    """
    whole = [nodes for nodes in candidates if nodes * procs % together == 0]
    return [n for n in whole if global_batch % (micro_batch * (n * procs // together)) == 0]
