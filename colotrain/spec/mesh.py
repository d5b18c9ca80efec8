"""The axes of the device mesh beside the plugin's: pipeline, context and tensor parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass

PP, DP_REPLICATE, DP_SHARD, TP = "pp", "dp_replicate", "dp_shard", "tp"
"""Axes of the device mesh, from the outermost: stages of the model, replicas of a stage, shards of
one replica, and parts of one shard's matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Axes of the mesh whose ranks work on the same samples.

    tp and cp are the innermost: ranks r·tp to r·tp + tp - 1 are a tensor-parallel group, and cp
    such groups work on parts of the same samples. The plugin's mesh shards over the axis cp as
    well. pp is the outermost: each stage of the model is on world size / pp ranks that follow one
    another.
    """

    pp: int = 1
    """Stages, each with some consecutive blocks of the model."""
    pp_chunks: int = 1
    """Chunks of consecutive blocks that each stage has: 1 under 1F1B, several if interleaved."""
    pp_split: tuple[int, ...] = ()
    """Number of blocks of each of the pp · pp_chunks chunks, which stages take in turn; empty where
    there is one stage."""
    cp: int = 1
    """Ranks, or tensor-parallel groups, that divide each sample's tokens among themselves."""
    tp: int = 1
    """Ranks that divide the model's matrices among themselves."""
    sequence_parallel: bool = False
    """Whether these ranks divide tokens among themselves outside of attention and MLP, too."""

    def blocks_of(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of the first and the last block of each chunk of a stage."""
        ends = [sum(self.pp_split[:end]) for end in range(len(self.pp_split) + 1)]
        chunks = range(stage, len(self.pp_split), self.pp)
        return tuple((ends[chunk], ends[chunk + 1] - 1) for chunk in chunks)

    @property
    def token_unit(self) -> int:
        """What the length of samples must be a multiple of."""
        own = self.cp * self.tp if self.sequence_parallel else 1
        return math.lcm(2 * self.cp if self.cp > 1 else 1, own)

    @property
    def together(self) -> int:
        """Ranks that work on the same samples."""
        return self.pp * self.cp * self.tp

    def unit(self, nodes: int) -> int:
        """What the number of ranks of each of `nodes` nodes must be a multiple of.

        Ranks that exchange inside every layer are on one node; stages may be on several.
        """
        return math.lcm(self.cp * self.tp, self.together // math.gcd(self.together, nodes))

    def data_rank(self, rank: int, *, world: int) -> int:
        """Number of the group that `rank` belongs to, which reads its own samples."""
        return rank % (world // self.pp) // (self.cp * self.tp)

    def reads_first(self, rank: int, *, world: int) -> bool:
        """Whether `rank` is the first of the ranks that work on the same samples."""
        return rank < world // self.pp and rank % (self.cp * self.tp) == 0

    @property
    def above_one(self) -> dict[str, int]:
        """Configuration key → size of each axis that is above 1."""
        axes = {"mesh.pp": self.pp, "mesh.cp": self.cp, "mesh.tp": self.tp}
        return {name: size for name, size in axes.items() if size > 1}

    @property
    def named(self) -> str:
        """The axes above 1, as in `mesh.cp=2, mesh.tp=4`."""
        return ", ".join(f"{name}={size}" for name, size in self.above_one.items())
