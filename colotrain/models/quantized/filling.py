"""Values of weights that are held as blocks: each rank packs what it keeps, a weight at a time.

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
from colotrain.models.quantized.layers import packed_weights, scales_of
from colotrain.models.quantized.schemes import Packed
from colotrain.models.quantized.stored import blocks_as_stored, open_weights
from colotrain.models.quantized.weights import PackedWeight
from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import ModelPlan


def names_in(model: nn.Module) -> set[str]:
    """Return the names of the parameters of blocks."""
    return {own for name in packed_weights(model) for own in (name, scales_of(name))}


def read_(model: nn.Module, plan: ModelPlan, *, shards: Shards, given: Set[str]) -> None:
    """Pack this rank's blocks of each weight in the directory, unless `given` has them."""
    weights = packed_weights(model)
    stored = open_weights(Path(str(plan.hf))) if weights else None
    for name, weight in weights.items():
        if stored is not None and not {name, scales_of(name)} <= given:
            with torch.no_grad():
                _read_weight_(weight, stored, sources_of(model).found[name], shards)


def _read_weight_(
    weight: PackedWeight, stored: StoredTensors, source: Source, shards: Shards
) -> None:
    device = _local(weight.packed.codes).device
    pack = partial(packed_rows, weight, stored, source, device=device)
    _store_(weight, weight.packed, shards, pack)
    for tensor in weight.packed:
        shards.release(tensor)


def _store_(
    weight: PackedWeight, packed: Packed, shards: Shards, pack: Callable[..., Packed]
) -> None:
    """Store this rank's part of `packed`, of whose rows `pack(begin=…, num=…)` returns blocks."""
    own = Packed(*(_local(tensor) for tensor in packed))
    if not own.codes.numel() or own.codes.is_meta:  # on the meta device: another stage's
        return
    part, each = shards.slices(packed.codes), weight.blocks_in_row or 1
    blocks = pack(begin=part[0].start * each if part else 0, num=len(own.codes) * each)
    for tensor, held, values in zip(own, packed, weight.as_held(blocks), strict=True):
        tensor.copy_(values[:, shards.slices(held)[1]] if part else values)


def packed_rows(
    weight: PackedWeight,
    stored: StoredTensors,
    source: Source,
    *,
    begin: int,
    num: int,
    device: torch.device | None = None,
) -> Packed:
    """Return `num` blocks of a weight from the block `begin` on, packed on `device`.

    Only the rows that have these blocks are read, of experts the blocks of one at a time. Blocks
    of the same scheme in the files are returned as they are.
    """
    numbers = weight.rows_each * weight.scheme.width_of(weight.inputs)
    is_matrix = len(weight.shape) == 2
    each = num if is_matrix else -(-numbers // weight.scheme.block_of(weight.inputs))
    ends = ((at, min(at + each, begin + num)) for at in range(begin, begin + num, max(each, 1)))
    parts = [_packed_between(weight, stored, source, at, end, device) for at, end in ends]
    return Packed(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _packed_between(
    weight: PackedWeight,
    stored: StoredTensors,
    source: Source,
    begin: int,
    end: int,
    device: torch.device | None,
) -> Packed:
    scheme, inputs, rows_each = weight.scheme, weight.inputs, weight.rows_each
    block, width = scheme.block_of(inputs), scheme.width_of(inputs)
    first, last = begin * block, min(end * block, width * weight.num_rows)
    entry = first // width // rows_each
    count = -(-last // (width * rows_each)) - entry
    skipped = first - entry * rows_each * width
    if (kept := blocks_as_stored(stored, source, scheme, entry, count)) is not None:
        part = slice(skipped // block, skipped // block + end - begin)
        return Packed(*(tensor[part].to(device) for tensor in kept))
    row = skipped // width
    rows = weight.as_rows(source.rows(stored, entry, count))[
        row : -(-(skipped + last - first) // width)
    ]
    numbers = scheme.numbers(rows)[skipped - row * width :][: last - first].to(weight.dtype)
    return scheme.packed(numbers.to(device), inputs)


def packed_part(
    weight: PackedWeight, whole: Tensor, *, begin: int = 0, num: int | None = None
) -> Packed:
    """Return blocks of the whole parameter: `num` from the block `begin` on, or all of them."""
    num = weight.num_blocks if num is None else num
    block = weight.scheme.block_of(weight.inputs)
    numbers = weight.scheme.numbers(weight.as_rows(whole))[begin * block : (begin + num) * block]
    return weight.scheme.packed(numbers, weight.inputs)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def packing(model: nn.Module, shards: Shards) -> Shards:
    """Return `shards` of whole weights for what is held as blocks, and store the blocks."""
    # taken now: an initialisation puts whole parameters in their modules for a while
    known = {id(w.packed.codes): (w, w.packed) for w in packed_weights(model).values()}

    def write(parameter: Tensor, whole: Tensor) -> None:
        if id(parameter) not in known:
            shards.write(parameter, whole)
            return
        weight, packed = known[id(parameter)]
        _store_(weight, packed, shards, partial(packed_part, weight, whole))

    def read(parameter: Tensor) -> Tensor:
        if id(parameter) not in known:
            return shards.read(parameter)
        weight, packed = known[id(parameter)]
        return weight.whole(packed=Packed(*(shards.read(tensor) for tensor in packed)))

    def release(parameter: Tensor) -> None:
        for tensor in known[id(parameter)][1] if id(parameter) in known else (parameter,):
            shards.release(tensor)

    def shape(parameter: Tensor) -> tuple[int, ...]:
        found = known.get(id(parameter))
        return shards.shape(parameter) if found is None else found[0].shape

    def dtype(parameter: Tensor) -> torch.dtype:
        found = known.get(id(parameter))
        return shards.dtype(parameter) if found is None else found[0].dtype

    return replace(shards, write=write, read=read, release=release, shape=shape, dtype=dtype)
