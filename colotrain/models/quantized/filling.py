"""Values of layers that hold blocks: each rank packs what it keeps, a layer at a time.

A rank's blocks are those that one process would make of the whole weight: a block needs no others.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from colotrain.models.filling import Shards
from colotrain.models.huggingface_files import Source
from colotrain.models.huggingface_match import sources_of
from colotrain.models.quantized.layers import SCALES, QuantizedLinear, quantized_layers
from colotrain.models.quantized.schemes import Packed
from colotrain.models.quantized.stored import open_weights
from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import ModelPlan


def names_in(model: nn.Module) -> set[str]:
    """Return the names of the parameters of layers that hold blocks."""
    return {f"{name}.{own}" for name in quantized_layers(model) for own in ("weight", SCALES)}


def read_(model: nn.Module, plan: ModelPlan, *, shards: Shards, given: Set[str]) -> None:
    """Pack this rank's blocks of each weight in the directory, unless `given` has the layer's."""
    layers = quantized_layers(model)
    stored = open_weights(Path(str(plan.hf))) if layers else None
    for name, layer in layers.items():
        if stored is not None and not {f"{name}.weight", f"{name}.{SCALES}"} <= given:
            with torch.no_grad():
                _read_layer_(layer, stored, sources_of(model).found[f"{name}.weight"], shards)


def _read_layer_(
    layer: QuantizedLinear, stored: StoredTensors, source: Source, shards: Shards
) -> None:
    device = _local(layer.weight).device
    pack = partial(packed_rows, layer, stored, source, device=device)
    _store_(layer.packed, shards, pack)
    for tensor in layer.packed:
        shards.release(tensor)


def _store_(packed: Packed, shards: Shards, pack: Callable[..., Packed]) -> None:
    """Store this rank's blocks, which `pack(begin=…, num=…)` returns."""
    own = Packed(*(_local(tensor) for tensor in packed))
    if not own.codes.numel() or own.codes.is_meta:  # on the meta device: another stage's
        return
    part = shards.slices(packed.codes)
    blocks = pack(begin=part[0].start if part else 0, num=len(own.codes))
    for tensor, values in zip(own, blocks, strict=True):
        tensor.copy_(values)


def packed_rows(
    layer: QuantizedLinear,
    stored: StoredTensors,
    source: Source,
    *,
    begin: int,
    num: int,
    device: torch.device | None = None,
) -> Packed:
    """Return `num` blocks of a layer from the block `begin` on, packed on `device`.

    Only the rows that have these blocks are read.
    """
    scheme, inputs = layer.scheme, layer.in_features
    block, width = scheme.block_of(inputs), scheme.width_of(inputs)
    first, end = begin * block, min((begin + num) * block, width * layer.out_features)
    row = first // width
    rows = source.rows(stored, row, -(-end // width) - row)
    numbers = scheme.numbers(rows)[first - row * width : end - row * width].to(layer.whole_dtype)
    return scheme.packed(numbers.to(device), inputs)


def _packed_part(layer: QuantizedLinear, whole: Tensor, *, begin: int, num: int) -> Packed:
    block = layer.scheme.block_of(layer.in_features)
    numbers = layer.scheme.numbers(whole)[begin * block : (begin + num) * block]
    return layer.scheme.packed(numbers, layer.in_features)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def packing(model: nn.Module, shards: Shards) -> Shards:
    """Return `shards` that take whole weights of layers that hold blocks, and store the blocks."""
    known = {id(m.weight): (m, m.packed) for m in quantized_layers(model).values()}

    def write(parameter: Tensor, whole: Tensor) -> None:
        if id(parameter) not in known:
            shards.write(parameter, whole)
            return
        layer, packed = known[id(parameter)]
        _store_(packed, shards, partial(_packed_part, layer, whole))

    def read(parameter: Tensor) -> Tensor:
        if id(parameter) not in known:
            return shards.read(parameter)
        layer, packed = known[id(parameter)]
        blocks = Packed(*(shards.read(tensor) for tensor in packed))
        return layer.scheme.unpacked(blocks, *_sizes(layer), layer.whole_dtype)

    def release(parameter: Tensor) -> None:
        for tensor in known[id(parameter)][1] if id(parameter) in known else (parameter,):
            shards.release(tensor)

    def shape(parameter: Tensor) -> tuple[int, ...]:
        found = known.get(id(parameter))
        return shards.shape(parameter) if found is None else _sizes(found[0])

    def dtype(parameter: Tensor) -> torch.dtype:
        found = known.get(id(parameter))
        return shards.dtype(parameter) if found is None else found[0].whole_dtype

    return replace(shards, write=write, read=read, release=release, shape=shape, dtype=dtype)


def _sizes(layer: QuantizedLinear) -> tuple[int, int]:
    return layer.out_features, layer.in_features
