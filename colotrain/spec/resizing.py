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
    groups = world // plan.mesh.together
    steps, rest = divmod(batch.global_batch, batch.micro_batch * groups)
    if rest:
        least, most = plan.elastic.min_nodes, max(plan.elastic.max_nodes, nodes)
        who = _named(groups, plan.mesh.together)
        per_node = batch.micro_batch * procs // plan.mesh.together
        sizes = reachable(batch.global_batch, per_node, range(least, most + 1))
        raise ColotrainError(
            f"{nodes} nodes: a global batch of {batch.global_batch} cannot be shared out among "
            f"{who} in micro-batches of {batch.micro_batch}",
            f"numbers of nodes that can: {', '.join(map(str, sizes)) or 'none'}",
        )
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


def reachable(global_batch: int, per_node: int, candidates: Iterable[int]) -> list[int]:
    """The numbers of nodes among `candidates` that divide the global batch evenly.

    `per_node` is the number of samples in one micro-batch of each of a node's ranks.
    """
    return [nodes for nodes in candidates if global_batch % (per_node * nodes) == 0]
