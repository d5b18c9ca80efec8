"""How blocks of a weight's numbers become a few bits each, and numbers again.

A weight [outputs, inputs] is cut row by row, without gaps, into blocks of equal length; the last
one is filled up with zeros, and so is the last one of each row where blocks stay within rows. Each
block has its codes and one scale, so that any blocks can be read without the others. Everything is
kept as bytes: no cast of parameters to half precision, and no other arithmetic, may touch a scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of 4-bit NormalFloat (Dettmers et al. 2023, appendix E), as in bitsandbytes."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The 4-bit floats without their sign, by code (OCP Microscaling Formats 1.0, section 5.3.3)."""
E8M0_BIAS = 127
MOST_EXPONENT = 2
"""Exponent of the largest of E2M1."""
LEAST = 1e-38
"""Least divisor, for blocks of zeros."""
LEAST_OF_ROWS = 1e-30
"""The same where 127 is divided, which must stay finite in float32."""
CHUNK_NUMEL = 1 << 20
"""Numbers that are unpacked at once; what their codes need as indices is freed with each chunk."""


class Packed(NamedTuple):
    """Blocks of a weight, as bytes."""

    codes: Tensor
    """[blocks, bytes]"""
    scales: Tensor
    """[blocks, bytes]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to pack blocks."""

    name: str
    block: int | None
    """Numbers of a block; None: a row of the weight."""
    code_bits: int
    scale_bytes: int
    pack: Callable[[Tensor], Packed]
    """Packs [blocks, numbers] of float32."""
    unpack: Callable[[Packed], Tensor]
    """Returns [blocks, numbers] of float32."""
    within_rows: bool = False
    """Whether no block has numbers of two rows."""

    def width_of(self, inputs: int) -> int:
        """Return the numbers of a row, with those that fill it up."""
        return inputs + (-inputs % self.block if self.within_rows and self.block else 0)

    def numbers(self, rows: Tensor) -> Tensor:
        """Return the numbers of rows [rows, inputs] in one line, as they are cut into blocks."""
        inputs = rows.shape[-1]
        missing = self.width_of(inputs) - inputs
        return (F.pad(rows, (0, missing)) if missing else rows).reshape(-1)

    def block_of(self, inputs: int) -> int:
        """Return the numbers of a block, in a weight of so many inputs."""
        return self.block or inputs

    def shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the codes and of the scales of a weight."""
        block = self.block_of(inputs)
        num = math.ceil(outputs * self.width_of(inputs) / block)
        return (num, block * self.code_bits // 8), (num, self.scale_bytes)

    def packed(self, numbers: Tensor, inputs: int) -> Packed:
        """Return the blocks of consecutive `numbers` that begin where a block does."""
        block = self.block_of(inputs)
        missing = -len(numbers) % block
        blocks = F.pad(numbers, (0, missing)) if missing else numbers
        each = max(CHUNK_NUMEL // block, 1)
        parts = [self.pack(part.float()) for part in blocks.view(-1, block).split(each)]
        return Packed(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def unpacked(
        self, packed: Packed, outputs: int, inputs: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the weight [outputs, inputs]; each number is rounded from float32 to `dtype`."""
        width = self.width_of(inputs)
        numbers = self.numbers_of(packed, dtype)[: outputs * width]
        return numbers.view(outputs, width)[:, :inputs].contiguous()

    def numbers_of(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Return the numbers of blocks in one line, with those that fill rows and blocks up."""
        block = 8 * packed.codes.shape[1] // self.code_bits
        each = max(CHUNK_NUMEL // block, 1)
        found = packed.codes.new_empty((len(packed.codes), block), dtype=dtype)
        # without values one chunk shows what all of them allocate
        for at in range(0, each if found.is_meta else len(found), each):
            part = Packed(*(tensor[at : at + each] for tensor in packed))
            found[at : at + each] = self.unpack(part)
        return found.view(-1)


def _bytes(scales: Tensor) -> Tensor:
    return scales.float().contiguous().view(torch.uint8)


def _floats(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float32)


def _pairs(values: tuple[float, ...], device: torch.device, *, high_first: bool) -> Tensor:
    """Return the two numbers of each byte, [256, 2]."""
    codes = torch.arange(256, device=device)
    high, low = codes // 16, codes % 16
    table = torch.tensor(values, device=device)
    return table[torch.stack((high, low) if high_first else (low, high), dim=1)]


def _in_pairs(codes: Tensor, *, high_first: bool) -> Tensor:
    """Put two codes below 16 into each byte."""
    first, second = codes.unflatten(1, (-1, 2)).unbind(2)
    return (first << 4) | second if high_first else first | (second << 4)


def _pack_nf4(blocks: Tensor) -> Packed:
    """Each number becomes the nearest of the 16 values times the block's largest absolute one."""
    absmax = blocks.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4, device="cpu")
    scaled = (blocks * (1.0 / absmax.clamp(min=LEAST))).clamp(-1, 1)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for bound in ((values[:-1] + values[1:]) / 2).tolist():  # seven times as fast as bucketize
        codes += scaled > bound
    return Packed(_in_pairs(codes, high_first=True), _bytes(absmax))


def _unpack_nf4(packed: Packed) -> Tensor:
    pairs = _pairs(NF4, packed.codes.device, high_first=True)
    return F.embedding(packed.codes.int(), pairs).flatten(1) * _floats(packed.scales)


def _pack_int8(rows: Tensor) -> Packed:
    """Each number becomes the nearest of 255 even shares of its row's largest absolute one."""
    absmax = rows.abs().amax(1, keepdim=True)
    codes = (rows * (127.0 / absmax.clamp(min=LEAST_OF_ROWS))).round().clamp(-127, 127)
    return Packed(codes.to(torch.int8).view(torch.uint8), _bytes(absmax))


def _unpack_int8(packed: Packed) -> Tensor:
    return packed.codes.view(torch.int8).float() * (_floats(packed.scales) / 127.0)


def _pack_mxfp4(blocks: Tensor) -> Packed:
    """Each number becomes the nearest E2M1 times a power of two, the even one of two as near.

    The power has the exponent of the block's largest number less that of E2M1's largest
    (specification, section 6.3); what is still larger becomes the largest.
    """
    absmax = blocks.abs().amax(1, keepdim=True)
    exponents = (torch.frexp(absmax).exponent - 1 - MOST_EXPONENT).clamp(-E8M0_BIAS, E8M0_BIAS)
    scales = torch.where(absmax > 0, exponents + E8M0_BIAS, 0)
    scales = torch.where(absmax.isfinite(), scales, 255).to(torch.uint8)  # 255 is NaN
    shares = blocks.abs() / _powers(scales)
    codes = torch.zeros_like(shares, dtype=torch.uint8)
    for below, (low, high) in enumerate(itertools.pairwise(E2M1)):
        bound = (low + high) / 2
        codes += shares >= bound if below % 2 else shares > bound
    return Packed(_in_pairs(codes + 8 * blocks.signbit().to(torch.uint8), high_first=False), scales)


def _unpack_mxfp4(packed: Packed) -> Tensor:
    values = (*E2M1, *(-value for value in E2M1))
    pairs = _pairs(values, packed.codes.device, high_first=False)
    return F.embedding(packed.codes.int(), pairs).flatten(1) * _powers(packed.scales)


def _powers(scales: Tensor) -> Tensor:
    """Return the powers of two that E8M0 bytes stand for, put together as bits of float32."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 1 << 22, bits)  # 2^-127, which is subnormal
    return torch.where(scales == 255, 0x7FC00000, bits).view(torch.float32)  # NaN


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="nf4",
            block=64,
            code_bits=4,
            scale_bytes=4,
            pack=_pack_nf4,
            unpack=_unpack_nf4,
        ),
        Scheme(
            name="int8",
            block=None,
            code_bits=8,
            scale_bytes=4,
            pack=_pack_int8,
            unpack=_unpack_int8,
        ),
        Scheme(
            name="mxfp4",
            block=32,
            code_bits=4,
            scale_bytes=1,
            pack=_pack_mxfp4,
            unpack=_unpack_mxfp4,
            within_rows=True,
        ),
    )
}
"""Value of `model.quantize` → scheme."""
