"""Parameters of which packed blocks are all that is kept, whatever module computes with them."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from colotrain.models.quantized.schemes import Packed, Scheme

SCALES = "absmax"
"""Name of the parameter with the scales of `weight`, beside which it is; others have a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A frozen weight [outputs, inputs], or a stack of those of all experts, held as blocks.

    The codes have the parameter's own name in the module: [rows, bytes] where a matrix has whole
    blocks in each row, so that ranks can divide rows or columns (`mesh.tp`), else [blocks, bytes];
    and so have the scales. A stack is packed as the matrix of all
    experts' rows [experts × outputs, inputs], also where the model has it as [experts, inputs,
    outputs].
    """

    module: Any
    key: str
    """Name of the parameter in the module."""
    scheme: Scheme
    shape: tuple[int, ...]
    """Shape of the whole parameter before it was packed; ranks may have the blocks of a part."""
    is_transposed: bool = False
    """Whether the parameter is [experts, inputs, outputs]."""
    dtype: torch.dtype
    """Dtype of the parameter before it was packed."""

    @property
    def scales_key(self) -> str:
        return scales_key(self.key)

    @property
    def inputs(self) -> int:
        return self.shape[-2 if self.is_transposed else -1]

    @property
    def rows_each(self) -> int:
        """Rows [inputs] of one expert; of a matrix 1, whose dimension 0 they are."""
        return math.prod(self.shape[1:]) // self.inputs

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.rows_each

    @property
    def packed(self) -> Packed:
        held = self.module._parameters
        return Packed(held[self.key], held[self.scales_key])

    def as_rows(self, values: Tensor) -> Tensor:
        """Return values of some entries of dimension 0 as rows [inputs]."""
        return (values.mT if self.is_transposed else values).reshape(-1, self.inputs)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return rows of whole entries of dimension 0 as the parameter has them."""
        if len(self.shape) == 2:
            return rows
        stack = rows.view(-1, self.rows_each, self.inputs)
        return stack.mT if self.is_transposed else stack

    @property
    def blocks_in_row(self) -> int | None:
        """Blocks of a row, where codes and scales are held row by row; None: block by block."""
        width, block = self.scheme.width_of(self.inputs), self.scheme.block_of(self.inputs)
        return width // block if len(self.shape) == 2 and width % block == 0 else None

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole parameter."""
        numbers = self.num_rows * self.scheme.width_of(self.inputs)
        return -(-numbers // self.scheme.block_of(self.inputs))

    def as_held(self, blocks: Packed) -> Packed:
        """Return blocks of whole rows as the module has them."""
        each = self.blocks_in_row
        if each is None:
            return blocks
        return Packed(*(tensor.reshape(-1, each * tensor.shape[1]) for tensor in blocks))

    def blocks_of(self, packed: Packed) -> Packed:
        """Return the blocks [blocks, bytes] of what the module has; int8's are a rank's columns."""
        if self.blocks_in_row is None or self.scheme.block is None:
            return packed
        num_bytes = self.scheme.block * self.scheme.code_bits // 8, self.scheme.scale_bytes
        held = zip(packed, num_bytes, strict=True)
        return Packed(*(tensor.reshape(-1, each) for tensor, each in held))

    def inputs_in(self, packed: Packed) -> int:
        """Return how many of the inputs the codes of rows stand for: all of them, or a rank's."""
        if self.blocks_in_row is None:
            return self.inputs
        return min(packed.codes.shape[1] * 8 // self.scheme.code_bits, self.inputs)

    def num_rows_in(self, packed: Packed) -> int:
        """Return how many rows blocks stand for: all of them, or those of a rank's entries."""
        if self.blocks_in_row is not None:
            return len(packed.codes)
        numbers = len(packed.codes) * self.scheme.block_of(self.inputs)
        return min(numbers // self.scheme.width_of(self.inputs), self.num_rows)

    @property
    def num_entries(self) -> int:
        """Entries of dimension 0 whose blocks the module holds."""
        return self.num_rows_in(self.packed) // self.rows_each

    @property
    def num_in_blocks(self) -> int:
        """Return how many neighbouring entries of dimension 0 have whole blocks, at the least."""
        block = self.scheme.block_of(self.inputs)
        return block // math.gcd(block, self.rows_each * self.scheme.width_of(self.inputs))

    def whole(self, dtype: torch.dtype | None = None, packed: Packed | None = None) -> Tensor:
        """Return the parameter that the blocks stand for, or the part of a rank's blocks."""
        packed = packed or self.packed
        sizes, blocks = (self.num_rows_in(packed), self.inputs_in(packed)), self.blocks_of(packed)
        return self.of_rows(unpacked(self.scheme, blocks, *sizes, dtype or self.dtype))

    def entries(self, packed: Packed, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return entries of dimension 0, for which no other blocks than theirs are unpacked."""
        if (start, end) == (0, self.num_rows_in(packed) // self.rows_each):
            return self.whole(dtype, packed)
        width, block = self.scheme.width_of(self.inputs), self.scheme.block_of(self.inputs)
        numbers = self.rows_each * width
        begin = start * numbers // block
        part = Packed(*(tensor[begin : -(-end * numbers // block)] for tensor in packed))
        skipped = start * numbers - begin * block
        rows = self.scheme.numbers_of(part, dtype)[skipped : skipped + (end - start) * numbers]
        return self.of_rows(rows.view(-1, width)[:, : self.inputs].contiguous())

    def hold_blocks_(self) -> None:
        """Put empty codes and scales in the parameter's place."""
        device = self.module._parameters[self.key].device
        shapes: Sequence[tuple[int, int]] = self.scheme.shapes(self.num_rows, self.inputs)
        if (each := self.blocks_in_row) is not None:
            shapes = [(self.num_rows, each * num_bytes) for _, num_bytes in shapes]
        for key, shape in zip((self.key, self.scales_key), shapes, strict=True):
            empty = torch.empty(shape, dtype=torch.uint8, device=device)
            self.module.register_parameter(key, nn.Parameter(empty, requires_grad=False))

    def hold_whole_(self) -> None:
        """Put the parameter that the blocks stand for in their place."""
        whole = self.whole().contiguous()
        delattr(self.module, self.scales_key)
        setattr(self.module, self.key, nn.Parameter(whole, requires_grad=False))


def scales_key(key: str) -> str:
    """Return the name, in its module, of the parameter with the scales of the parameter `key`."""
    return SCALES if key == "weight" else f"{key}_{SCALES}"


def unpacked(
    scheme: Scheme, packed: Packed, num_rows: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of numbers, by bitsandbytes' kernel where it is installed, on CUDA."""
    kernel = kernel_of(scheme.name) if packed.codes.is_cuda else None
    if kernel is not None:
        return cast(Tensor, kernel(packed, (num_rows, inputs), dtype))
    return scheme.unpacked(packed, num_rows, inputs, dtype)


@functools.cache
def kernel_of(scheme: str) -> Any:
    """Return bitsandbytes' function that unpacks the scheme's blocks; None where there is none."""
    if scheme != "nf4" or importlib.util.find_spec("bitsandbytes") is None:
        return None
    return unpack_by_bitsandbytes


def unpack_by_bitsandbytes(packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Unpack nf4 blocks by bitsandbytes, which has no bytes for what fills the last block up."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    numel = shape[0] * shape[1]
    absmax = packed.scales.view(torch.float32).view(-1)
    state = QuantState(absmax, shape=torch.Size(shape), blocksize=64, quant_type="nf4", dtype=dtype)
    found: Tensor = dequantize_4bit(packed.codes.view(-1)[: -(-numel // 2)].view(-1, 1), state)
    return found
