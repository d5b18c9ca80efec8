"""Directories whose weights are stored quantized, read as the numbers that these stand for.

config.json names the method; a tensor has the name and the shape that it has in the model, and
its codes, scales and settings are no tensors of the directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from colotrain.errors import ColotrainError
from colotrain.models.huggingface_files import Source, Stored
from colotrain.models.quantized.schemes import SCHEMES, Packed, Scheme
from colotrain.models.stored import FLOATING, StoredTensors, weight_files
from colotrain.rundir import read_json

BLOCKS, SCALES = "_blocks", "_scales"
STATE = ".quant_state.bitsandbytes__"
"""Part of the name of a tensor with JSON about 4-bit codes; the type of the codes follows."""
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
ROW_SCALES, ROW_FORMAT = "SCB", "weight_format"
TAKE_ANOTHER = "give the directory from before it was quantized"


class Quantized(Protocol):
    """A tensor that is stored as codes and scales."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> set[str]:
        """Names in the files of what it is stored as."""

    def rows(self, files: StoredTensors, start: int, count: int) -> Tensor:
        """`count` rows of dimension 0 from `start` on."""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """MXFP4 as GPT-OSS has it: blocks [experts, outputs, groups, bytes] of a transposed stack."""

    name: str
    stored_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, num_bytes = self.stored_shape
        return experts, groups * num_bytes * 2, outputs

    @property
    def names(self) -> set[str]:
        return {self.name + BLOCKS, self.name + SCALES}

    def blocks(self, files: StoredTensors, start: int, count: int) -> Packed:
        """Return the blocks of `count` experts from `start` on, row by row of their outputs."""
        codes, scales = (files.rows(self.name + end, start, count) for end in (BLOCKS, SCALES))
        return Packed(codes.flatten(0, 2), scales.reshape(-1, 1))

    def rows(self, files: StoredTensors, start: int, count: int) -> Tensor:
        _, inputs, outputs = self.shape
        packed = self.blocks(files, start, count)
        # bfloat16 has every product of such a float and power
        found = SCHEMES["mxfp4"].unpacked(packed, count * outputs, inputs, torch.bfloat16)
        return found.view(count, outputs, inputs).mT


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBits:
    """4-bit codes of bitsandbytes, the first of two in the upper half of a byte.

    The numbers are those of float32, before they are rounded to the dtype that the settings name.
    """

    name: str
    state: str
    """Name of the tensor with the settings."""
    shape: tuple[int, ...]
    block: int
    nested_block: int
    """Scales that have a scale together; 0: they are floats."""
    nested_offset: float

    @property
    def names(self) -> set[str]:
        kinds = PARTS if self.nested_block else PARTS[:2]
        return {self.name, self.state, *(f"{self.name}.{kind}" for kind in kinds)}

    def rows(self, files: StoredTensors, start: int, count: int) -> Tensor:
        width = math.prod(self.shape[1:])
        first, end = start * width, (start + count) * width
        begin = first // self.block  # each block begins with a byte
        num = -(-end // self.block) - begin
        stored = files.rows(self.name, begin * self.block // 2, num * self.block // 2).flatten()
        codes = torch.stack((stored >> 4, stored & 15), 1).flatten().int()
        values = files.rows(f"{self.name}.quant_map")[codes]
        scales = self._scales(files, begin, num).repeat_interleave(self.block)[: len(values)]
        found = (values * scales)[first - begin * self.block : end - begin * self.block]
        return found.view(-1, *self.shape[1:])

    def _scales(self, files: StoredTensors, begin: int, num: int) -> Tensor:
        scales = files.rows(f"{self.name}.absmax", begin, num)
        if not self.nested_block:
            return scales
        kinds = ("nested_quant_map", "nested_absmax")
        values, nested = (files.rows(f"{self.name}.{kind}") for kind in kinds)
        places = torch.arange(begin, begin + len(scales)) // self.nested_block
        return values[scales.int()] * nested[places] + self.nested_offset


@dataclass(frozen=True, slots=True)
class EightBits:
    """LLM.int8 of bitsandbytes: each row in 127ths of its scale."""

    name: str
    owner: str
    shape: tuple[int, ...]

    @property
    def names(self) -> set[str]:
        return {self.name, self.owner + ROW_SCALES, self.owner + ROW_FORMAT}

    def rows(self, files: StoredTensors, start: int, count: int) -> Tensor:
        codes, scales = (files.rows(n, start, count) for n in (self.name, self.owner + ROW_SCALES))
        return codes.float() * (scales.float()[:, None] / 127.0)


def _find_mxfp4(files: StoredTensors) -> Iterator[Mxfp4Experts]:
    for blocks in (name for name in files if name.endswith(BLOCKS)):
        name = blocks.removesuffix(BLOCKS)
        shape = files.shape(blocks)
        scales = files.shape(name + SCALES) if name + SCALES in files else None
        is_whole = len(shape) == 4 and shape[3] == 16 and scales == shape[:3]
        if not is_whole or {files.dtype(blocks), files.dtype(name + SCALES)} != {"U8"}:
            raise _unknown(blocks, "blocks of 16 bytes with a scale each")
        yield Mxfp4Experts(name, shape)


def _find_bitsandbytes(files: StoredTensors) -> Iterator[FourBits | EightBits]:
    for state in (name for name in files if STATE in name):
        yield _four_bits(files, state)
    for scales in (name for name in files if name.rpartition(".")[2] == ROW_SCALES):
        owner = scales.removesuffix(ROW_SCALES)
        name = owner + "weight"
        if (
            name not in files
            or files.dtype(name) != "I8"
            or len(files.shape(name)) != 2
            or files.shape(name)[:1] != files.shape(scales)
            or files.dtype(scales) not in FLOATING
        ):
            raise _unknown(scales, "one for each row of int8")
        if owner + ROW_FORMAT in files and files.rows(owner + ROW_FORMAT).tolist() not in (0, [0]):
            raise _unknown(owner + ROW_FORMAT, "0, for rows that are stored one after another")
        yield EightBits(name, owner, files.shape(name))


def _four_bits(files: StoredTensors, state: str) -> FourBits:
    name = state.partition(STATE)[0]
    expected = "settings of 4-bit codes that are stored as bytes, in whole blocks"
    try:
        settings: dict[str, Any] = json.loads(bytes(files.rows(state).tolist()))
        found = FourBits(
            name=name,
            state=state,
            shape=tuple(int(size) for size in settings["shape"]),
            block=int(settings["blocksize"]),
            nested_block=int(settings.get("nested_blocksize") or 0),
            nested_offset=float(settings.get("nested_offset") or 0.0),
        )
    except (*(ValueError, TypeError, KeyError, AttributeError), *(OverflowError, RecursionError)):
        raise _unknown(state, expected) from None
    is_whole = len(found.shape) == 2 and min(found.shape) > 0
    is_whole &= found.block > 0 and found.block % 2 == 0 and found.nested_block >= 0
    if not is_whole or not found.names <= {*files} or not _fits(files, found):
        raise _unknown(state, expected)
    return found


def _fits(files: StoredTensors, found: FourBits) -> bool:
    """Whether the parts of 4-bit codes have the sizes and dtypes of their settings."""
    num = math.prod(found.shape)
    num_scales = -(-num // found.block)
    expected = {
        "": (-(-num // 2), ("U8",)),
        ".absmax": (num_scales, ("U8",) if found.nested_block else FLOATING),
        ".quant_map": (16, FLOATING),
    }
    if found.nested_block:
        expected[".nested_absmax"] = (-(-num_scales // found.nested_block), FLOATING)
        expected[".nested_quant_map"] = (256, FLOATING)
    return all(
        files.dtype(found.name + part) in dtypes
        and files.shape(found.name + part) in ((size,), *([(size, 1)] if not part else []))
        for part, (size, dtypes) in expected.items()
    )


def _unknown(name: str, expected: str) -> ColotrainError:
    return ColotrainError(f"{name}: expected {expected}", TAKE_ANOTHER)


FORMATS: dict[str, Callable[[StoredTensors], Iterable[Quantized]]] = {
    "mxfp4": _find_mxfp4,
    "bitsandbytes": _find_bitsandbytes,
}
"""`quant_method` of config.json → the tensors of the files that are stored quantized."""


class DequantizedTensors(StoredTensors):
    """Tensors in files of which some are stored quantized."""

    def __init__(
        self, files: Iterable[Path], find: Callable[[StoredTensors], Iterable[Quantized]]
    ) -> None:
        super().__init__(files)
        self._raw = StoredTensors(())
        self._raw._files = dict(self._files)
        self._quantized = {found.name: found for found in find(self._raw)}  # type: ignore[attr-defined]
        for found in self._quantized.values():
            for name in found.names:
                self._files.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._quantized or super().__contains__(name)

    def __iter__(self) -> Any:
        return iter([*self._quantized, *self._files])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._quantized[name].shape if name in self._quantized else super().shape(name)

    def dtype(self, name: str) -> str:
        return "F32" if name in self._quantized else super().dtype(name)

    def rows(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        if name not in self._quantized:
            return super().rows(name, start, count)
        found = self._quantized[name]
        left = found.shape[0] - start
        return found.rows(self._raw, start, left if count is None else min(count, left))


def blocks_as_stored(
    files: StoredTensors, source: Source, scheme: Scheme, start: int, count: int
) -> Packed | None:
    """Return blocks of a scheme that the files have for `count` experts; None where they differ."""
    if not isinstance(files, DequantizedTensors) or not isinstance(source, Stored):
        return None
    found = files._quantized.get(source.name)
    if not isinstance(found, Mxfp4Experts) or scheme.name != "mxfp4":
        return None
    return found.blocks(files._raw, start, count)


def open_weights(folder: Path) -> StoredTensors:
    """Open the tensors of a model directory, whether they are stored quantized or not."""
    files = weight_files(folder)
    find = FORMATS.get(method_of(folder) or "")
    return StoredTensors(files) if find is None else DequantizedTensors(files, find)


def method_of(folder: Path) -> str | None:
    """Return how the weights of a model directory are quantized, as its config.json says it."""
    found = read_json(folder / "config.json").get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    return None if method is None else str(method)
