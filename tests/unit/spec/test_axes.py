"""The arrangement of ranks, against one that is counted out."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from colotrain.spec.axes import (
    CP,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    PP,
    SAMPLES,
    STAGE,
    TP,
    MeshPlan,
    Ranks,
    node_of,
    ranks_on,
)

AXES = (PP, DP_REPLICATE, DP_SHARD, CP, EP, TP)


def arrangements() -> Iterator[tuple[MeshPlan, int, int]]:
    """Mesh, replicas and shards; `cp` divides their product, but not always the shards."""
    for pp, cp, ep, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2)):
        for replicas, shard in itertools.product((1, 2, 3), (1, 2, 4)):
            if replicas * shard % cp == 0 and (ep == 1 or (cp == 1 and pp < 3)):
                yield MeshPlan(pp=pp, cp=cp, ep=ep, tp=tp), replicas, shard


def counted(mesh: MeshPlan, replicas: int, shard: int) -> list[dict[str, int]]:
    """What each rank is, with ranks given out one after the other."""
    found = []
    for stage in range(mesh.pp):
        copies = itertools.count()
        for replica, row in itertools.product(range(replicas), range(shard)):
            reader, part = divmod(next(copies), mesh.cp)
            for experts, column in itertools.product(range(mesh.ep), range(mesh.tp)):
                coords = dict(zip(AXES, (stage, replica, row, part, experts, column), strict=True))
                found.append({**coords, "reader": reader * mesh.ep + experts})
    return found


def test_ranks_are_arranged_as_counted_out() -> None:
    for arrangement in arrangements():
        compare_with_counted(*arrangement)


def compare_with_counted(mesh: MeshPlan, replicas: int, shard: int) -> None:
    wanted = counted(mesh, replicas, shard)
    ranks = Ranks.of(mesh, world=len(wanted), shard=shard)
    assert ranks.world == len(wanted)
    assert ranks.readers == mesh.readers(len(wanted)) == len({rank["reader"] for rank in wanted})
    assert mesh.together * ranks.readers == len(wanted)
    for number, rank in enumerate(wanted):
        assert ranks.coords(number) == {axis: rank[axis] for axis in AXES}
        assert ranks.reader(number) == rank["reader"]
        same = [other for other, it in enumerate(wanted) if it["reader"] == rank["reader"]]
        assert ranks.peers(number, *SAMPLES) == tuple(same)
        assert ranks.is_first(number, *SAMPLES) == (same[0] == number)
    for axes in ((PP,), (DP_REPLICATE,), (DP_SHARD,), (EP,), (TP,), STAGE, (DP_REPLICATE, TP)):
        together = defaultdict(list)
        for number, rank in enumerate(wanted):
            others = {PP, DP_REPLICATE, DP_SHARD, EP, TP} - {*axes}
            together[tuple(rank[axis] for axis in sorted(others))].append(number)
        assert sorted(ranks.groups(*axes)) == sorted(map(tuple, together.values()))
        for group in together.values():
            assert [ranks.index(number, *axes) for number in group] == [*range(len(group))]
            assert {ranks.peers(number, *axes) for number in group} == {tuple(group)}
            assert ranks.size(*axes) == len(group)
    parts = defaultdict(list)
    for number, rank in enumerate(wanted):
        parts[rank[PP], rank["reader"], rank[TP]].append(number)
    assert sorted(ranks.groups(CP)) == sorted(map(tuple, parts.values()))


def test_without_a_shard_size_there_are_no_replicas() -> None:
    ranks = Ranks.of(MeshPlan(tp=2), world=8)
    assert ranks.sizes == {DP_SHARD: 4, TP: 2}
    assert Ranks.of(MeshPlan(), world=4, shard=4).sizes == {DP_REPLICATE: 1, DP_SHARD: 4}
    assert Ranks.of(MeshPlan(pp=2), world=7).world == 6  # one has no place
    assert MeshPlan(pp=2, tp=2).readers(6) == 0
    assert (MeshPlan(ep=4).readers(6), MeshPlan(ep=4).readers(8)) == (0, 8)


@pytest.mark.parametrize("procs", [1, 2, 3, 4, 6, 8])
def test_which_ranks_are_on_one_node(procs: int) -> None:
    assert [[*ranks_on(node, procs_per_node=procs)] for node in range(3)] == [
        [rank for rank in range(3 * procs) if node_of(rank, procs_per_node=procs) == node]
        for node in range(3)
    ]
    seen = set()
    for mesh, replicas, shard in arrangements():
        ranks = Ranks.of(mesh, world=replicas * shard * mesh.copy_ranks, shard=shard)
        if procs % mesh.parts or ranks.world % procs:
            continue
        inside = [{rank // procs for rank in group} for group in ranks.groups(DP_SHARD, EP, TP)]
        fits = all(len(nodes) == 1 for nodes in inside)
        assert ranks.on_one_node(DP_SHARD, procs_per_node=procs) == fits
        pairs = [pair for line in ranks.groups(PP) for pair in itertools.pairwise(line)]
        near = any(one // procs == other // procs for one, other in pairs)
        if pairs:
            assert ranks.has_neighbours_on_node(PP, procs_per_node=procs) == near
        seen.add((fits, near))
    assert len(seen) > 1


PACKAGE = Path(__file__).parents[3] / "colotrain"
SIZES = {"pp", "cp", "ep", "tp", "dp_shard", "dp_replicate", "shard_size"}
OPERATORS = (ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
EXCEPTIONS = {
    "spec/axes.py": "the arithmetic",
    "planner/stages.py": "how many blocks a stage has",
    "planner/context.py": "a part of the bytes of activations",
    "planner/plugin.py": "whether a setting is a divisor",
    "planner/model.py": "whether a vocabulary can be divided",
    "planner/offload.py": "bytes of all parts of a parameter",
}
"""Module → why it computes with the size of an axis."""


def computes_with_sizes(text: str) -> list[int]:
    """The lines in which the size of an axis is a factor or divisor, or a rank is divided."""

    def name_of(node: ast.AST) -> str:
        return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            names, divides = {name_of(node.left), name_of(node.right)}, ast.FloorDiv | ast.Mod
            divides_rank = name_of(node.left) == "rank" and isinstance(node.op, divides)
            found += [node.lineno] if names & SIZES or divides_rank else []
    return found


@pytest.mark.parametrize("text", ["rank // mesh.tp", "world // (pp * tp)", "shard.rank % size"])
def test_arithmetic_with_ranks_is_found(text: str) -> None:
    assert computes_with_sizes(text) != []


def test_only_one_module_computes_with_ranks() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if computes_with_sizes(path.read_text("utf-8"))
    }
    assert found == EXCEPTIONS.keys()


def test_only_one_module_makes_process_groups() -> None:
    made = ("dist.new_group(", "init_device_mesh(")
    files = [p for p in PACKAGE.rglob("*.py") if any(w in p.read_text("utf-8") for w in made)]
    assert [str(path.relative_to(PACKAGE)) for path in files] == ["engine/comms/groups.py"]
