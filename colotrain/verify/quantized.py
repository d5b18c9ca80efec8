"""Weights that layers with packed blocks compute with, in plain torch, for one process.

Written apart from `models.quantized`: each number is compared with all values that a block can
have, and codes are taken out of bytes one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from colotrain.models.facts import facts_of
from colotrain.models.huggingface_match import missing_in
from colotrain.models.quantized.layers import packed_weights, scales_of

BLOCKS_AT_ONCE = 1024
NF4_BLOCK = 64
NF4_VALUES = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)

MXFP4_BLOCK = 32
MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _round_nf4(weight: Tensor) -> Tensor:
    """Each number, over the largest of its 64, becomes the nearest of 16 values."""
    flat = weight.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % NF4_BLOCK)])
    rounded = []
    for block in padded.view(-1, NF4_BLOCK).split(BLOCKS_AT_ONCE):
        largest = block.abs().max(1, keepdim=True).values
        shares = block * (1.0 / largest.clamp_min(1e-38))
        distances = (shares.double()[:, :, None] - NF4_VALUES.double()).abs()
        rounded.append(NF4_VALUES[distances.argmin(2)] * largest)
    return torch.cat(rounded).flatten()[: len(flat)].view_as(weight)


def _read_nf4(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Numbers of blocks whose bytes have the first of two codes in their upper half."""
    codes, scales = codes.reshape(-1, NF4_BLOCK // 2), scales.reshape(-1, 4)
    found = torch.empty(len(codes), NF4_BLOCK)
    found[:, 0::2] = NF4_VALUES[codes.long() // 16]
    found[:, 1::2] = NF4_VALUES[codes.long() % 16]
    found *= scales.clone().view(torch.float32)
    return found.flatten()[: shape[0] * shape[1]].view(shape)


def _round_int8(weight: Tensor) -> Tensor:
    """Each number becomes a whole number of 127ths of the largest in its row."""
    rounded = torch.empty_like(weight)
    for index, row in enumerate(weight):
        largest = row.abs().max()
        parts = torch.round(row * (127.0 / torch.clamp_min(largest, 1e-30)))
        rounded[index] = (parts + 0.0) * (largest / 127.0)  # a whole number has no -0
    return rounded


def _read_int8(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Numbers of rows whose bytes are whole numbers in two's complement."""
    signed = codes.float() - 256.0 * (codes > 127)
    return (signed * (scales.clone().view(torch.float32) / 127.0)).view(shape)


def _round_mxfp4(weight: Tensor) -> Tensor:
    """Each number of 32 in a row becomes the nearest 4-bit float times a power of two.

    Written in float64, with logarithms and distances; of two values as near, the one at an even
    place is taken.
    """
    rounded = torch.empty_like(weight)
    preferred = MXFP4_VALUES[[0, 2, 4, 6, 1, 3, 5, 7]]  # argmin takes the first of two
    for first in range(0, weight.shape[1], MXFP4_BLOCK):
        block = weight[:, first : first + MXFP4_BLOCK].double()
        largest = block.abs().max(1, keepdim=True).values
        exponents = torch.floor(torch.log2(largest)).clamp(-125, 129) - 2
        shares = block / 2.0**exponents
        nearest = preferred[(shares.abs()[:, :, None] - preferred).abs().argmin(2)]
        whole = torch.copysign(nearest, block) * 2.0**exponents  # a zero keeps its sign
        rounded[:, first : first + MXFP4_BLOCK] = whole.float()
    return rounded


def _read_mxfp4(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Numbers of blocks whose bytes have the first of two codes in their lower half."""
    codes, scales = codes.reshape(-1, MXFP4_BLOCK // 2), scales.reshape(-1, 1)
    found = torch.empty(len(codes), MXFP4_BLOCK, dtype=torch.float64)
    for place, half in enumerate((codes.long() % 16, codes.long() // 16)):
        found[:, place::2] = MXFP4_VALUES[half % 8] * (1.0 - 2.0 * (half // 8))
    found *= 2.0 ** (scales.double() - 127.0)
    return found.float().view(shape[0], -1)[:, : shape[1]].contiguous()


ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "nf4": _round_nf4,
    "int8": _round_int8,
    "mxfp4": _round_mxfp4,
}
"""Value of `model.quantize` → the weight that the blocks of a float32 weight stand for."""
READ: dict[str, Callable[[Tensor, Tensor, tuple[int, int]], Tensor]] = {
    "nf4": _read_nf4,
    "int8": _read_int8,
    "mxfp4": _read_mxfp4,
}
"""Value of `model.quantize` → the weight of a shape that codes and scales stand for."""


def stored_values(folder: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a directory that is stored quantized, as float32; None for others."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    method = str((config.get("quantization_config") or {}).get("quant_method"))
    read = {"mxfp4": _dequantized_mxfp4, "bitsandbytes": _dequantized_bitsandbytes}.get(method)
    if read is None:
        return None
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    read(stored)
    return stored


def _dequantized_mxfp4(stored: dict[str, Tensor]) -> None:
    """Put stacks [experts, inputs, outputs] in place of blocks [experts, outputs, groups, 16]."""
    for name in [n.removesuffix("_blocks") for n in stored if n.endswith("_blocks")]:
        blocks, scales = stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales")
        experts = [
            _read_mxfp4(b.reshape(-1, 16), s.reshape(-1, 1), (len(b), b[0].numel() * 2)).T
            for b, s in zip(blocks, scales, strict=True)
        ]
        stored[name] = torch.stack(experts).contiguous()


def _dequantized_bitsandbytes(stored: dict[str, Tensor]) -> None:
    """Put weights in place of 4-bit codes and of rows of int8, and of what stands beside them."""
    for state in [name for name in stored if ".quant_state.bitsandbytes__" in name]:
        name = state.partition(".quant_state.")[0]
        settings = json.loads(bytes(stored.pop(state).tolist()))
        absmax = stored.pop(f"{name}.absmax")
        if absmax.dtype == torch.uint8:
            steps = stored.pop(f"{name}.nested_quant_map")[absmax.long()]
            nested, size = stored.pop(f"{name}.nested_absmax"), settings["nested_blocksize"]
            for index, largest in enumerate(nested):
                steps[index * size : (index + 1) * size] *= largest
            absmax = steps + settings["nested_offset"]
        values, bytes_ = stored.pop(f"{name}.quant_map"), stored[name].flatten().long()
        numbers = torch.empty(2 * len(bytes_))
        numbers[0::2], numbers[1::2] = values[bytes_ // 16], values[bytes_ % 16]
        for index, block in enumerate(numbers.split(settings["blocksize"])):
            block *= absmax[index]
        stored[name] = numbers[: math.prod(settings["shape"])].view(settings["shape"])
    for scales in [name for name in stored if name.endswith(".SCB")]:
        owner = scales.removesuffix("SCB")
        stored.pop(f"{owner}weight_format", None)
        rows = stored.pop(scales).float()
        parts = [
            row.float() * (rows[at] / 127.0) for at, row in enumerate(stored[f"{owner}weight"])
        ]
        stored[f"{owner}weight"] = torch.stack(parts)


def round_(model: nn.Module, name: str) -> None:
    """Round the weights of the linear layers and experts that a run packs.

    They are those in the model's files, but for the head's and tied ones.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    find = getattr(model, "get_output_embeddings", None)
    heads = [find() if find is not None else getattr(model, "head", None)]
    heads += [getattr(model, name, None) for name in ("score", "classifier")]
    lacking = set(missing_in(model)) if facts_of(model).sources is not None else set()
    last = list(model.named_parameters())[-1][0].rpartition(".")[0]
    kept = {m for head in (*heads, model.get_submodule(last)) if head for m in head.modules()}
    with torch.no_grad():
        for layer in (m for m in model.modules() if type(m) is nn.Linear and m not in kept):
            owners = [n for n, p in known.items() if p is layer.weight]
            if len(owners) == 1 and owners[0] not in lacking:
                layer.weight.copy_(ROUND[name](layer.weight.float()))
        for full, stack in known.items():
            owner = model.get_submodule(full.rpartition(".")[0])
            is_stack = stack.ndim == 3 and len(stack) == getattr(owner, "num_experts", None)
            if is_stack and full not in lacking and owner not in kept:
                stack.copy_(_round_experts(stack, name, getattr(owner, "is_transposed", False)))


def _round_experts(stack: Tensor, name: str, is_transposed: bool) -> Tensor:
    """Round the experts' weights as those of linear layers, the rows of all one after another."""
    rows = [expert.T if is_transposed else expert for expert in stack.float()]
    rounded = ROUND[name](torch.cat(rows)).split([len(row) for row in rows])
    return torch.stack([expert.T if is_transposed else expert for expert in rounded])


def with_weights(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` of parameters by name, with weights in place of codes and scales."""
    found = dict(values)
    for name, weight in packed_weights(model).items():
        if name in found:
            codes, scales, shape = found[name], found.pop(scales_of(name)), weight.shape
            inputs = shape[1] if weight.is_transposed else shape[-1]
            rows = READ[weight.scheme.name](codes, scales, (math.prod(shape) // inputs, inputs))
            stack = rows.view(*shape[:-2], -1, inputs)
            found[name] = (stack.mT if weight.is_transposed else stack).to(weight.dtype)
    return found


def without_scales(model: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Return names of parameters without those of scales, which one process does not have."""
    return names - {scales_of(name) for name in packed_weights(model)}
