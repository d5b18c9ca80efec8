"""AdamW whose two moments have 8 bits per element, in blocks that ranks never divide.

Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization"): a block has its largest
absolute value as its scale, and of each element the number of the nearest value of a table that is
dense near zero. Here a block lies within a row (`spec.optimizers.Blocks`), so that whoever has the
row has the block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.engine.optim.base import OverShards, adamw_
from colotrain.spec.optimizers import BLOCKS

MOMENTS = ("exp_avg", "exp_avg_sq")
ELEMENTS_AT_ONCE = 1 << 18
"""Elements whose moments are numbers at a time: a few MiB, which stay in a processor's cache."""
DECADES = 7


@functools.cache
def values_of_codes(*, signed: bool) -> Tensor:
    """Return the 256 values of codes, ascending, from -1 or 0 to 1 (Dettmers 2016, 2022).

    Decade d, from 10^-6 to 1, is divided into 2^d equal intervals, or 2^(d+1) without a sign, whose
    middles are values; 0 and 1 are two more.
    """
    found = [0.0, 1.0]
    for decade in range(DECADES):
        number = 2 ** (decade + (not signed))
        edges = torch.linspace(0.1, 1.0, number + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        found += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTables:
    """Tables that turn codes into values, and values into the codes of the nearest ones.

    The upper half of a float32's bits names an interval so small that at most one middle between
    two values lies in it: a comparison with that middle decides between two neighbouring codes.
    """

    values: Tensor
    lowest: Tensor
    """Upper half of the bits → code of the smallest number of that interval."""
    middles: Tensor
    """Upper half of the bits → number above which the next code is nearer."""

    def decode(self, codes: Tensor) -> Tensor:
        return self.values.index_select(0, codes.flatten().int()).view(codes.shape)

    def encode(self, values: Tensor) -> Tensor:
        """Return the codes of float32 `values` between -1 and 1; of two as near, the lower one.

        Without a sign, what is above zero never gets the code of zero: a first moment would
        be divided by it.
        """
        flat = values.flatten()
        upper = (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        codes = self.lowest.index_select(0, upper)
        codes += flat > self.middles.index_select(0, upper)
        return codes.view(values.shape)


@functools.cache
def code_tables(device: torch.device, *, signed: bool) -> CodeTables:
    values = values_of_codes(signed=signed)
    middles = (values[:-1] + values[1:]) / 2
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    lowest = torch.bucketize(smallest.nan_to_num(), middles)
    if not signed:
        lowest[1:].clamp_(min=1)
    last = middles.new_full((1,), torch.inf)
    following = torch.cat((middles, last)).index_select(0, lowest)
    return CodeTables(
        values=values.to(device),
        lowest=lowest.to(device, torch.uint8),
        middles=following.to(device),
    )


Piece = tuple[slice, slice]
"""Rows, and the elements of a row that are whole blocks of it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a parameter: codes like the parameter's elements, scales like its rows."""

    codes: Tensor
    scales: Tensor
    tables: CodeTables

    def load(self, piece: Piece) -> Tensor:
        """Return the numbers of a piece."""
        rows, columns = piece
        found = self.tables.decode(self.codes[rows, columns])
        return _times_blocks(found, self.scales[rows, _blocks_of(columns)])

    def store(self, piece: Piece, values: Tensor) -> None:
        """Keep the numbers of a piece; `values` are changed."""
        rows, columns = piece
        width, size = values.shape[1], BLOCKS.size
        blocks = F.pad(values, (0, -width % size)) if width % size else values
        scales = blocks.view(len(values), -1, size).abs().amax(-1)
        self.scales[rows, _blocks_of(columns)] = scales
        tiny = torch.finfo(scales.dtype).tiny  # a block of zeros has no scale
        shares = _times_blocks(values, scales.clamp_(min=tiny), inverse=True)
        self.codes[rows, columns] = self.tables.encode(shares)


def _blocks_of(columns: slice) -> slice:
    return slice(columns.start // BLOCKS.size, BLOCKS.num_in_row(columns.stop))


def _times_blocks(values: Tensor, factors: Tensor, *, inverse: bool = False) -> Tensor:
    """Multiply each block of `values` (rows × elements) in place by its factor, or divide it."""
    act = Tensor.div_ if inverse else Tensor.mul_
    size, whole = BLOCKS.size, values.shape[1] // BLOCKS.size
    if whole:
        inside = values[:, : whole * size].unflatten(1, (whole, size))
        act(inside, factors[:, :whole, None])
    if whole < factors.shape[1]:
        act(values[:, whole * size :], factors[:, whole:])
    return values


def pieces(rows: int, row: int) -> Iterator[Piece]:
    """Yield pieces of a matrix: several rows of it, or some blocks of one long row."""
    width = min(row, ELEMENTS_AT_ONCE // BLOCKS.size * BLOCKS.size)
    height = max(1, ELEMENTS_AT_ONCE // width) if width == row else 1
    for top in range(0, rows, height):
        for left in range(0, row, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, row))


class AdamW8bit(OverShards):
    """torch's AdamW over moments of 8 bits; small parameters have theirs in 32 bits.

    An update takes the moments before they are rounded. Which parameters are small, and what a
    block is, follows from the whole parameter.
    """

    def _update(self) -> None:
        for parameter, grad, state, group in self._updated():
            if "exp_avg_codes" in state:
                _update_pieces(parameter, grad, state, group)
            else:
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                adamw_(parameter, grad, mean, square, state["step"].item(), group)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        has_codes = BLOCKS.hold(self.layout.whole_shape(parameter))
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for name in MOMENTS:
            if not has_codes:
                state[name] = torch.zeros_like(parameter, dtype=wide)
                continue
            rows, *others = parameter.shape
            shape = rows, BLOCKS.num_in_row(math.prod(others)), *(1 for _ in others[1:])
            state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scales"] = parameter.new_zeros(shape, dtype=torch.float32)


def _update_pieces(
    parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Update a parameter with moments of 8 bits, a few rows or blocks at a time."""
    if not parameter.numel():
        return
    rows, step = len(parameter), state["step"].item()
    matrix, gradients = parameter.view(rows, -1), grad.reshape(rows, -1)
    first, second = (
        Moment(
            state[f"{name}_codes"].view(rows, -1),
            state[f"{name}_scales"].view(rows, -1),
            code_tables(parameter.device, signed=name == "exp_avg"),
        )
        for name in MOMENTS
    )
    for piece in pieces(*matrix.shape):
        mean, square = first.load(piece), second.load(piece)
        adamw_(matrix[piece], gradients[piece], mean, square, step, group)
        first.store(piece, mean)
        second.store(piece, square)
