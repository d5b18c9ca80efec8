"""How the matrices of a model can be divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from colotrain.errors import ColotrainError

VOCABULARY = "vocabulary"
"""Style of an embedding and of a head with its loss, which have a part of the vocabulary's rows."""
MOST_RANKS = 64
"""Largest group that messages name."""
SUM_BYTES = 32 << 20
"""Bytes of gradients that the ranks of a group sum at a time, in a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The part of a parameter's dimension `dim` that one rank of a group holds."""

    dim: int
    start: int
    size: int
    whole: int
    """Size of the dimension in the whole parameter."""

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole parameter; `part` is the shape of any of its parts."""
        return tuple(self.whole if dim == self.dim else size for dim, size in enumerate(part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisions:
    """The parameters of a model that are divided, and the numbers of ranks that can do so."""

    dims: Mapping[str, int | None] = field(default_factory=dict)
    """Glob on parameter names → dimension that is divided; None: not divided, as all others are.

    The first glob that matches a name counts.
    """
    sizes: dict[str, int] = field(default_factory=dict)
    """What the number of ranks must divide, by the name that messages use."""
    num_kv_heads: int = 1
    """Heads of keys and values, which the number of ranks must divide, or be a multiple of."""
    styles: dict[str, str] = field(default_factory=dict)
    """Glob on modules → how they compute with parts; empty for models that do so themselves."""
    divides_tokens: bool = False
    """Whether ranks can divide tokens between the parts of layers (`mesh.sequence_parallel`)."""
    against: str = ""
    """Why the model cannot be divided; empty where it can."""

    def dim_of(self, name: str) -> int | None:
        """Return the dimension of a parameter that is divided; None where it is not."""
        return next((dim for glob, dim in self.dims.items() if fnmatchcase(name, glob)), None)

    def allows(self, ranks: int) -> bool:
        """Whether a group of `ranks` can divide the model evenly."""
        if ranks > 1 and self.against:
            return False
        heads = self.num_kv_heads
        whole = all(size % ranks == 0 for size in self.sizes.values())
        return whole and (heads % ranks == 0 or ranks % heads == 0)

    def possible(self) -> list[int]:
        return [ranks for ranks in range(1, MOST_RANKS + 1) if self.allows(ranks)]

    def part_of(self, name: str, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's part of a parameter."""
        split = self.split(name, shape, rank=0, ranks=ranks)
        return tuple(split.size if split and i == split.dim else n for i, n in enumerate(shape))

    def split(self, name: str, shape: Sequence[int], *, rank: int, ranks: int) -> Split | None:
        """Return the part that `rank` of the group holds; None for a parameter not divided.

        A vocabulary that `sizes` does not name stays whole where it cannot be divided evenly; any
        other parameter that cannot raises `ColotrainError`.
        """
        dim = self.dim_of(name)
        if dim is None:
            return None
        if shape[dim] % ranks:
            module = name.rpartition(".")[0]
            if any(s == VOCABULARY and fnmatchcase(module, g) for g, s in self.styles.items()):
                return None
            problem = f"mesh.tp={ranks}: {name} has a size of {shape[dim]}, not divided by {ranks}"
            raise ColotrainError(problem, "choose a mesh.tp that divides it")
        size = shape[dim] // ranks
        return Split(dim=dim, start=rank * size, size=size, whole=shape[dim])
