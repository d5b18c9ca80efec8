"""The axes along which the ranks of a run differ, and all arithmetic with ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from colotrain.records import after
from colotrain.spec.settings import CommonMesh


class Axis(StrEnum):
    """What distinguishes ranks, from the outermost: neighbours differ in the last one first."""

    PP = "pp"
    """Stages of the model, each with some consecutive blocks."""
    DP_REPLICATE = "dp_replicate"
    """Replicas of a stage."""
    DP_SHARD = "dp_shard"
    """Shards of a replica: ranks that divide each parameter's rows among themselves."""
    CP = "cp"
    """Parts of the tokens of a sample."""
    EP = "ep"
    """Parts of the experts of a shard."""
    TP = "tp"
    """Parts of the matrices of a shard."""


PP, DP_REPLICATE, DP_SHARD, CP, EP, TP = Axis
STAGE = (DP_REPLICATE, DP_SHARD, EP, TP)
"""Axes along which ranks of one pipeline stage differ; without stages, all ranks."""
COPY = (DP_SHARD, EP, TP)
"""Axes along which the ranks that divide one copy of a stage's parameters differ."""
MATRICES = frozenset({EP, TP})
"""Axes along which ranks have parts of some parameters, each of which is then sharded."""
SAMPLES = (PP, CP, TP)
"""Axes in which the ranks that work on the same samples differ."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The sizes of the axes, and from them what each rank has, and with whom it shares it.

    The ranks of a stage follow one another, and so do those of a tensor-parallel group. The ranks
    (or tensor-parallel groups) of a stage are divided twice: into replicas of shards, by what they
    hold, and into readers of `cp` neighbours each, by what they compute. Neighbours that divide
    experts are readers of their own.
    """

    sizes: Mapping[Axis, int]
    """Axis → size, outermost first, of the axes that there are.

    The context-parallel size is not a factor of the world size: each context-parallel group
    consists of neighbouring data-parallel ranks.
    """

    @classmethod
    def of(cls, mesh: MeshPlan, *, world: int, shard: int | None = None) -> Ranks:
        """Return the arrangement of `world` ranks, of which `shard` divide each parameter.

        None: there are no replicas. If `world` is not a multiple of pp × ep × tp × shard, the
        remaining ranks are left out.
        """
        copies = world // mesh.copy_ranks
        data = {DP_SHARD: copies}
        if shard is not None:
            data = {DP_REPLICATE: copies // shard, DP_SHARD: shard}
        sizes = {PP: mesh.pp, **data, CP: mesh.cp, EP: mesh.ep, TP: mesh.tp}
        return cls({axis: size for axis, size in sizes.items() if axis in data or size > 1})

    @property
    def world(self) -> int:
        return self.size(PP, *STAGE)

    @property
    def readers(self) -> int:
        """Number of groups that read different samples; ranks within a group read the same ones."""
        return self.size(DP_REPLICATE, DP_SHARD, EP) // self.size(CP)

    @property
    def data_sizes(self) -> tuple[int, ...]:
        """The sizes of the plugin's axes: replicas, if there are any, and shards."""
        return tuple(self.sizes[axis] for axis in (DP_REPLICATE, DP_SHARD) if axis in self.sizes)

    def size(self, *axes: Axis) -> int:
        """Return the product of the sizes; 1 for an axis that there is not."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def coords(self, rank: int) -> dict[Axis, int]:
        """Return the index of a rank in each axis."""
        return {axis: rank // self._stride(axis) % self.size(axis) for axis in Axis}

    def index(self, rank: int, *axes: Axis) -> int:
        """Return the number of a rank among those that differ in these axes, given outermost first.

        It is the place of the rank in `peers` of these axes.
        """
        index, coords = 0, self.coords(rank)
        for axis in axes:
            index = index * self.size(axis) + coords[axis]
        return index

    def is_first(self, rank: int, *axes: Axis) -> bool:
        """Whether the rank is the first of those that differ from it in these axes alone."""
        return self.index(rank, *axes) == 0

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks, it included, that differ from a rank in these axes alone."""
        coords = self.coords(rank)
        first = rank - sum(coords[axis] * self._stride(axis) for axis in axes)
        ways = (range(0, self.size(a) * self._stride(a), self._stride(a)) for a in axes)
        return tuple(sorted(first + sum(steps) for steps in itertools.product(*ways)))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return `peers` of all ranks, each group once, ordered by their first ranks."""
        firsts = (rank for rank in range(self.world) if self.is_first(rank, *axes))
        return tuple(self.peers(rank, *axes) for rank in firsts)

    def of_stage(self, stage: int) -> range:
        """Return the ranks of a pipeline stage."""
        num = self.size(*STAGE)
        return range(stage * num, (stage + 1) * num)

    def reader(self, rank: int) -> int:
        """Return the number, among all readers, of the one whose samples a rank works on."""
        return self.index(rank, *STAGE) // self.size(CP, TP)

    def on_one_node(self, axis: Axis, *, procs_per_node: int) -> bool:
        """Whether the ranks that differ in this axis, and those between them, are on one node."""
        return procs_per_node % (self._stride(axis) * self.size(axis)) == 0

    def has_neighbours_on_node(self, axis: Axis, *, procs_per_node: int) -> bool:
        """Whether ranks of a node are neighbours in this axis."""
        return self._stride(axis) < procs_per_node

    def largest_shard(self, *, procs_per_node: int) -> int:
        """Return how many ranks of a node can divide parameters, so that replicas are alike."""
        return math.gcd(procs_per_node // self.size(EP, TP), self.size(DP_REPLICATE, DP_SHARD))

    def _stride(self, axis: Axis) -> int:
        """Return the difference of two ranks that are neighbours in an axis."""
        within = (EP, TP)
        inside = {PP: STAGE, DP_REPLICATE: (DP_SHARD, *within), DP_SHARD: within, CP: within}
        inside |= {EP: (TP,), TP: ()}
        return self.size(*inside[axis])


def node_of(rank: int, *, procs_per_node: int) -> int:
    """Return the node that a rank is on."""
    return rank // procs_per_node


def ranks_on(node: int, *, procs_per_node: int) -> range:
    """Return the ranks of a node."""
    return range(node * procs_per_node, (node + 1) * procs_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan(CommonMesh):
    """The section, with sizes that are 1 or more, and without a schedule: chunks tell which it is.

    `sequence_parallel` is false without tensor-parallel ranks.
    """

    pp_chunks: int = field(default=1, metadata=after("pp"))
    """Chunks of consecutive blocks that each stage has: 1 under 1F1B, several if interleaved."""

    def chunks_of(self, stage: int) -> range:
        """Return the positions of a stage's chunks among all chunks of the model."""
        return range(stage, len(self.pp_split), self.pp)

    def blocks_of(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of the first and the last block of each chunk of a stage."""
        ends = [sum(self.pp_split[:end]) for end in range(len(self.pp_split) + 1)]
        return tuple((ends[chunk], ends[chunk + 1] - 1) for chunk in self.chunks_of(stage))

    @property
    def token_unit(self) -> int:
        """What the length of samples must be a multiple of."""
        divided = self.cp * self.tp if self.sequence_parallel else 1
        return math.lcm(2 * self.cp if self.cp > 1 else 1, divided)

    @property
    def together(self) -> int:
        """Ranks that work on the same samples."""
        return self.pp * self.cp * self.tp

    @property
    def parts(self) -> int:
        """Ranks that have parts of one copy of a stage: of its experts, or of its matrices."""
        return self.ep * self.tp

    @property
    def copy_ranks(self) -> int:
        """Ranks that have parts of one copy of the model, before the plugin shards it."""
        return self.pp * self.parts

    def readers(self, world: int) -> int:
        """Return the groups of such ranks among `world` ranks; 0 if they are not whole."""
        return 0 if world % math.lcm(self.together, self.copy_ranks) else world // self.together

    def unit(self, nodes: int) -> int:
        """What the number of ranks of each of `nodes` nodes must be a multiple of.

        Ranks that exchange inside every layer are on one node; stages may be on several.
        """
        return math.lcm(
            self.cp * self.tp,
            self.parts,
            self.together // math.gcd(self.together, nodes),
        )

    @property
    def above_one(self) -> dict[str, int]:
        """Configuration key → size of each axis that is above 1."""
        axes = {"mesh.pp": self.pp, "mesh.cp": self.cp, "mesh.ep": self.ep, "mesh.tp": self.tp}
        return {name: size for name, size in axes.items() if size > 1}

    @property
    def named(self) -> str:
        """The axes above 1, as in `mesh.cp=2, mesh.tp=4`."""
        return ", ".join(f"{name}={size}" for name, size in self.above_one.items())
