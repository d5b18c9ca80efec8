"""Checks of the numbers of nodes, from `elastic.min_nodes` to `elastic.max_nodes`, of a run."""

from __future__ import annotations

from collections.abc import Iterator

from colotrain.config.schema import Config, Elastic
from colotrain.errors import Problem
from colotrain.planner.scale import Scale
from colotrain.spec.axes import DP_SHARD, Ranks
from colotrain.spec.plan import BatchPlan
from colotrain.spec.resizing import reachable


def check_sizes(elastic: Elastic, scale: Scale, batch: BatchPlan) -> Iterator[Problem]:
    """Problem of numbers of nodes, from min_nodes to max_nodes, that do not divide the batch."""
    least, most = elastic.min_nodes or scale.nodes, elastic.max_nodes or scale.nodes
    wanted = range(least, most + 1)
    procs, mesh = scale.procs_per_node, scale.mesh
    found = reachable(batch.global_batch, batch.micro_batch, wanted, procs, mesh)
    missing = [str(nodes) for nodes in wanted if nodes not in found]
    if missing and (least, most) != (scale.nodes, scale.nodes):
        key, fix = "train.global_batch", "change one of these, or elastic.min_nodes and max_nodes"
        groups = mesh.readers(procs) or f"{procs} / {mesh.together}"
        expected = (
            f"a multiple of {batch.micro_batch} × {groups} × nodes for every number "
            f"of nodes from {least} to {most}, which it is not for {', '.join(missing)} "
            f"(reachable: {', '.join(map(str, found)) or 'none'})"
        )
        yield Problem(key=key, value=batch.global_batch, expected=expected, fix=fix)


def check_meshes(settings: Config, scale: Scale) -> Iterator[Problem]:
    """Problem of numbers of nodes, other than the planned one, that do not fit the shard size."""
    shard, elastic = settings.plugin.shard_size, settings.elastic
    procs, mesh = scale.procs_per_node, scale.mesh
    least, most = elastic.min_nodes or scale.nodes, elastic.max_nodes or scale.nodes
    others = [n for n in range(least, most + 1) if n != scale.nodes]
    copies = {n: Ranks.of(mesh, world=n * procs).size(DP_SHARD) for n in others}
    missing = [str(n) for n, num in copies.items() if shard and shard > 0 and num % shard]
    if missing:
        parts = mesh.copy_ranks
        each = procs if parts == 1 else f"{procs} / {parts}"
        expected = (
            f"a divisor of {each} × nodes for every number of nodes from {least} to {most}, which "
            f"it is not for {', '.join(missing)}"
        )
        fix = "change it, or elastic.min_nodes and max_nodes"
        yield Problem(key="plugin.shard_size", value=shard, expected=expected, fix=fix)


def check_replace_slow(elastic: Elastic, scale: Scale) -> Iterator[Problem]:
    """Problem of leaving slow nodes on devices whose ranks do not know for how long they wait."""
    if elastic.replace_slow and scale.device != "cpu":
        expected = (
            f"false on {scale.device}: how long its ranks wait for others is not known there, so "
            "that a slow node cannot be told from those that wait for it"
        )
        key, fix = "elastic.replace_slow", "remove it; what is known is shown by the dashboard"
        yield Problem(key=key, value=True, expected=expected, fix=fix)


def check_kept(settings: Config, *, has_copies: bool) -> Iterator[Problem]:
    """Problem of leaving slow nodes where nothing keeps the steps that were made."""
    elastic, every = settings.elastic, settings.checkpoint.every
    if elastic.replace_slow and every == 0 and not has_copies:
        expected = (
            "checkpoints, or copies in memory (elastic.memory_copy), with elastic.replace_slow: "
            "all steps would be lost with a node that is left"
        )
        fix = "set checkpoint.every, null for one when a node is left and at the end"
        yield Problem(key="checkpoint.every", value=every, expected=expected, fix=fix)


def warn_of_first_node(elastic: Elastic, scale: Scale) -> Iterator[str]:
    """Warning of a run that begins on the one node that is never left."""
    if elastic.replace_slow and scale.nodes == 1:
        yield (
            "elastic.replace_slow: node 0 leads the run and is never left, so nothing can replace "
            "a slow machine before another node joins"
        )
