"""The optimizers that `optim.name` may name, and what engine and planner ask of each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Runs of elements whose 8-bit codes share one scale, so that a code can be told as a number.

    A block lies within a row, which is all elements of one index of the first dimension: the ranks
    divide a parameter by rows, and blocks are then the same on any number of ranks.
    """

    size: int = 256
    """Elements of a block; the last one of a row may have fewer."""
    min_numel: int = 4096
    """Elements of the smallest whole parameter whose state has 8 bits."""
    min_row: int = 16
    """Elements of the shortest row whose state has 8 bits."""
    code_bytes: int = 1
    scale_bytes: int = 4

    def hold(self, shape: Sequence[int]) -> bool:
        """Whether the state of a parameter of this whole shape has 8 bits, not 32."""
        is_large = len(shape) > 1 and math.prod(shape) >= self.min_numel
        return is_large and math.prod(shape[1:]) >= self.min_row

    def num_in_row(self, row: int) -> int:
        return math.ceil(row / self.size)


BLOCKS = Blocks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer in any run; `engine.optim.optimizers` makes it."""

    state_tensors: int
    """State tensors of the parameter's shape that are kept between steps."""
    num_betas: tuple[int, ...] = ()
    """Numbers of values that `optim.betas` may have; empty where betas are not used."""
    betas_are: str = "two numbers"
    betas_example: str = "[0.9,0.95]"
    momentum_beta: int | None = None
    """Index of the beta that `optim.momentum` sets; None where the optimizer has no momentum."""
    momentum_is_optional: bool = False
    """Whether no state is kept unless the first beta is above zero."""
    counts_steps: bool = False
    """Whether a further tensor per parameter counts its steps."""
    begins_with_zeros: bool = False
    """Whether a first step begins from zeroed state."""
    is_elementwise: bool = False
    """Whether an element's update needs that element alone. torch's AdamW or SGD has the same
    state: torch's memory tracker runs it instead."""
    is_fused: bool = False
    """Whether it is torch's, with a fused kernel, and one in Python for complex numbers."""
    loses_halves: bool = False
    """Whether its fused kernel loses updates in half precision on the CPU."""
    tells_hidden: bool = False
    """Whether it updates the matrices of numbered layers in another way than the rest."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Keys of a matrix's state → its dimension, from the end, of which it has sums and so 1."""
    averages: bool = False
    """Whether a run is evaluated and exported with a mean of its parameters over all steps."""
    orthogonalizes: bool = False
    """Whether it makes the updates of matrices of layers orthogonal, in bfloat16."""
    blocks: Blocks | None = None
    """How the state of large parameters has 8 bits; None where it has the parameter's dtype."""

    @property
    def counter_bytes(self) -> int:
        """Bytes of single numbers per parameter: the step count, and what a mean needs."""
        return 4 * self.counts_steps + 16 * self.averages

    @property
    def is_counted(self) -> bool:
        """Whether `bytes_per_row` is exact, not the most or an assumption."""
        return self.is_elementwise or self.blocks is not None

    def bytes_per_row(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of state for each row of a parameter of this whole shape, or for a scalar."""
        row = math.prod(shape[1:])
        if self.blocks is None:
            return self.state_tensors * row * itemsize
        if not self.blocks.hold(shape):
            return self.state_tensors * row * max(itemsize, 4)
        scales = self.blocks.num_in_row(row) * self.blocks.scale_bytes
        return self.state_tensors * (row * self.blocks.code_bytes + scales)


OPTIMIZERS = {
    "adamw": Optimizer(
        state_tensors=2,
        num_betas=(2,),
        counts_steps=True,
        begins_with_zeros=True,
        is_elementwise=True,
        is_fused=True,
    ),
    "sgd": Optimizer(
        state_tensors=1,
        num_betas=(1, 2),
        betas_are="SGD's momentum",
        betas_example="[0.9]",
        momentum_beta=0,
        momentum_is_optional=True,
        begins_with_zeros=True,
        is_elementwise=True,
        is_fused=True,
        loses_halves=True,
    ),
    "lion": Optimizer(state_tensors=1, num_betas=(2,), is_elementwise=True),
    # The most: embeddings have AdamW's two; matrices have one.
    "muon": Optimizer(
        state_tensors=2, num_betas=(2,), momentum_beta=1, tells_hidden=True, orthogonalizes=True
    ),
    "adafactor": Optimizer(state_tensors=0, sums={"row_var": -1, "col_var": -2}),
    "adamw8bit": Optimizer(
        state_tensors=2, num_betas=(2,), counts_steps=True, begins_with_zeros=True, blocks=BLOCKS
    ),
    "schedule_free_adamw": Optimizer(
        state_tensors=2, num_betas=(2,), counts_steps=True, is_elementwise=True, averages=True
    ),
}
CUSTOM_OPTIMIZER = Optimizer(state_tensors=2)
"""Properties assumed of a user's optimizer, `package.module:Class`; its state may be smaller."""


_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
NEWTON_SCHULZ_STEPS = 5


def is_in_a_layer(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix of a numbered layer, apart from norms and biases."""
    return len(shape) == 2 and bool(_IN_A_LAYER.search(name))


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Floating-point operations that make a matrix orthogonal (Jordan et al. 2024)."""
    short, long = min(shape), max(shape)
    return NEWTON_SCHULZ_STEPS * (4 * short * short * long + 2 * short**3)


def rounds_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[tuple[int, int]]]:
    """Divide matrices over ranks: rounds of (index of the matrix, rank that computes on it).

    A rank has one matrix a round at most. Matrices of a round cost nearly the same, as the costly
    ones come first, and the costliest of a round goes to the rank with the least work so far.
    """
    costs = [newton_schulz_flops(shape) for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda index: (-costs[index], index))
    work, rounds = [0] * ranks, []
    for start in range(0, len(order), ranks):
        idlest = sorted(range(ranks), key=lambda rank: (work[rank], rank))
        pairs = list(zip(order[start : start + ranks], idlest, strict=False))
        for index, rank in pairs:
            work[rank] += costs[index]
        rounds.append(pairs)
    return rounds


def optimizer_of(name: str) -> Optimizer:
    return OPTIMIZERS.get(name, CUSTOM_OPTIMIZER)
