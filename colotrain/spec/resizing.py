"""A plan on another number of nodes: the same global batch, so the same optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from colotrain.errors import ColotrainError
from colotrain.spec.axes import DP_SHARD, MeshPlan, Ranks
from colotrain.spec.plan import RunPlan


def resize(plan: RunPlan, nodes: int) -> RunPlan:
    """`plan` on `nodes` nodes, with accumulation and mesh computed anew.

    Raises `ColotrainError` where the global batch cannot be divided among so many ranks.
    """
    if nodes == plan.cluster.nodes:
        return plan
    procs, batch, mesh = plan.cluster.procs_per_node, plan.batch, plan.mesh
    world = nodes * procs
    readers = mesh.readers(world)
    if nodes not in reachable(batch.global_batch, batch.micro_batch, [nodes], procs, mesh):
        least, most = plan.elastic.min_nodes, max(plan.elastic.max_nodes, nodes)
        who = _named(readers, mesh.together) if readers else f"{world} ranks"
        wanted = range(least, most + 1)
        sizes = reachable(batch.global_batch, batch.micro_batch, wanted, procs, mesh)
        raise ColotrainError(
            f"{nodes} nodes: a global batch of {batch.global_batch} cannot be shared out among "
            f"{who} in micro-batches of {batch.micro_batch}",
            f"numbers of nodes that can: {', '.join(map(str, sizes)) or 'none'}",
        )
    ranks = plan.plugin.arrange(mesh, world=world)
    if ranks.world != world:
        copies = Ranks.of(mesh, world=world).size(DP_SHARD)
        who = _named(copies, mesh.parts)
        raise ColotrainError(
            f"{nodes} nodes: {who} cannot be divided into replicas of {plan.plugin.dp_shard}",
            f"set plugin.shard_size to a divisor of {procs}",
        )
    steps = batch.global_batch // (batch.micro_batch * readers)
    return dataclasses.replace(
        plan,
        world_size=world,
        cluster=dataclasses.replace(plan.cluster, nodes=nodes),
        plugin=dataclasses.replace(plan.plugin, mesh=ranks.data_sizes),
        batch=dataclasses.replace(batch, accumulation_steps=steps, data_parallel=readers),
    )


def _named(groups: int, ranks: int) -> str:
    return f"{groups} ranks" if ranks == 1 else f"{groups} groups of {ranks} ranks"


def reachable(
    global_batch: int, micro_batch: int, candidates: Iterable[int], procs: int, mesh: MeshPlan
) -> list[int]:
    """The numbers of nodes among `candidates`, of `procs` ranks, that share the batch evenly."""
    readers = {nodes: mesh.readers(nodes * procs) for nodes in candidates}
    return [n for n, num in readers.items() if num and global_batch % (micro_batch * num) == 0]
