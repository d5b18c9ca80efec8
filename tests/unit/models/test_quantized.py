"""Packed blocks: bit for bit those of bitsandbytes, the same however they are divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.engine.model.freezing import freeze_
from colotrain.errors import ConfigError
from colotrain.export.reader import ROUNDED
from colotrain.models import adapters
from colotrain.models.adapters import features
from colotrain.models.loading import build, build_whole
from colotrain.models.quantized.filling import packed_rows
from colotrain.models.quantized.layers import dequantize_, packed_weights
from colotrain.models.quantized.schemes import E2M1, SCHEMES, Packed
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import AdapterPlan, FreezePlan, ModelPlan
from colotrain.verify import quantized as reference
from tests.families import FAMILIES

LLM = {"vocab_size": 32, "d_model": 24, "num_layers": 2, "num_heads": 2, "d_hidden": 40}
LORA = AdapterPlan(rank=3, alpha=6.0, targets=("query", "down"))
SCALES = [2.34375, 1.5625, 0.78125]
CODES = bytes.fromhex(
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e"
    "2af4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29"
)
"""quantize_4bit of bitsandbytes 0.50.2 for `numbers()`, blocksize 64, nf4."""


ROW_OF_INT8 = [-127, -33, 61, -102, -8, 86, -76, 18, 112, -51, 43, -119, -25, 69, -94]
SCALE_OF_INT8 = 2.34375
MOST_ROUNDED = {"nf4": 0.16, "int8": 0.0041, "mxfp4": 0.25}
"""Half of the largest distance of two values, over the largest value."""


def numbers() -> Tensor:
    n = torch.arange(150)
    return (((n * 37) % 101 - 50) * (3 - n // 64) / 64).view(10, 15)


def packed_whole(name: str, weight: Tensor) -> Packed:
    scheme = SCHEMES[name]
    return scheme.packed(scheme.numbers(weight), weight.shape[1])


def llm(scheme: str | None = "nf4", **changes: Any) -> ModelPlan:
    adapter = changes.pop("adapter", LORA)
    args = LLM | changes
    return ModelPlan(target="colotrain.models.llm:LLM", args=args, adapter=adapter, quantize=scheme)


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = packed_weights(model).items()
    return {name.removesuffix(".weight"): weight.whole() for name, weight in found}


def test_blocks_are_those_of_bitsandbytes() -> None:
    packed = packed_whole("nf4", numbers())
    assert bytes(packed.codes.flatten().tolist())[: len(CODES)] == CODES
    assert packed.scales.view(torch.float32).flatten().tolist() == SCALES


@pytest.mark.parametrize("shape", [(300, 130), (64, 64), (33, 7), (1, 1)])
@pytest.mark.parametrize("name", SCHEMES)
def test_three_ways_to_read_a_weight_agree(name: str, shape: tuple[int, int]) -> None:
    """The engine's, that of `verify`, and that of the process that checks exports."""
    weight, scheme = torch.randn(shape), SCHEMES[name]
    weight[0] = 0.0
    packed = packed_whole(name, weight)
    found = scheme.unpacked(packed, *shape)
    assert torch.equal(found, reference.ROUND[name](weight))
    assert torch.equal(found, reference.READ[name](*packed, shape))
    assert torch.equal(found, ROUNDED[name](weight))
    assert torch.equal(packed_whole(name, found).codes, packed.codes)
    largest = weight.abs().max().item()
    assert (found - weight).abs().max().item() <= largest * MOST_ROUNDED[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_ranks_blocks_are_those_of_the_whole_weight(name: str, tmp_path: Path) -> None:
    model = build(llm(name, d_model=24, d_hidden=37), seed=0)
    held = packed_weights(model)["blocks.0.mlp.up.weight"]
    weight = torch.randn(held.shape)
    source: Any = _Rows(weight)
    whole = packed_whole(name, weight)
    for begin in range(0, len(whole.codes), 5):
        num = min(5, len(whole.codes) - begin)
        own = packed_rows(held, source, source, begin=begin, num=num)
        for found, wanted in zip(own, whole, strict=True):
            assert torch.equal(found, wanted[begin : begin + num])
    assert source.most < len(weight)


class _Rows:
    """A tensor in files, and the most rows that were read at once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.most = tensor, 0

    def rows(self, _: object, start: int, count: int) -> Tensor:
        self.most = max(self.most, count)
        return self.tensor[start : start + count]


def test_the_head_tied_layers_and_adapters_keep_their_weights() -> None:
    own = {f"attention.{name}" for name in ("query", "key", "value", "output")}
    own |= {f"mlp.{name}" for name in ("gate", "up", "down")}
    wanted = {f"blocks.{index}.{name}.weight" for index in range(2) for name in own}
    for ties in (False, True):
        model = build(llm(tie_embeddings=ties), seed=0)
        found = packed_weights(model)
        assert found.keys() == wanted
        assert all(features(weight.module) is not None for weight in found.values())


def test_gradients_are_those_of_a_plain_layer_and_no_weight_is_kept_for_them() -> None:
    packed, plain = (build_whole(llm(), seed=0) for _ in range(2))
    dequantize_(plain)
    ids, kept = torch.randint(32, (2, 9)), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, wanted[name].grad), name
    shapes = {tuple(layer.shape) for layer in weights(packed).values()}
    assert not any(tuple(tensor.shape) in shapes for tensor in kept)


def test_rows_of_whole_numbers_are_those_of_bitsandbytes() -> None:
    """int8_vectorwise_quant of bitsandbytes 0.50.2, of the same numbers in float16."""
    packed = packed_whole("int8", numbers())
    assert packed.codes.view(torch.int8)[0].tolist() == ROW_OF_INT8
    assert packed.scales.view(torch.float32).flatten()[:1].tolist() == [SCALE_OF_INT8]


def test_blocks_of_32_are_those_of_transformers() -> None:
    """Codes and scales drawn at random, those of subnormal and of infinite numbers included."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    codes = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(255, (3, 10, 4), dtype=torch.uint8)
    scales[0] = torch.tensor([0, 1, 253, 254], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = mxfp4.convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2)
        packed = Packed(codes.view(-1, 16), scales.view(-1, 1))
        found = SCHEMES["mxfp4"].unpacked(packed, 30, 128, dtype)
        assert torch.equal(found.view(3, 10, 128), wanted)


def test_numbers_become_the_nearest_four_bit_floats_and_even_ones_of_two() -> None:
    ties = [(low + high) / 2 for low, high in pairwise(E2M1)]
    numbers = torch.tensor([*E2M1, *ties, 5.01, 7.9, -0.3, -0.2, -7.0]) / 64
    found = SCHEMES["mxfp4"].unpacked(packed_whole("mxfp4", numbers[None]), 1, len(numbers))
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert (found[0] * 64).tolist() == [*E2M1, *even, 6.0, 6.0, -0.5, -0.0, -6.0]


def test_no_block_of_32_has_numbers_of_two_rows() -> None:
    weight = torch.stack([torch.full((40,), 6.0), torch.full((40,), 6.0 / 1024)])
    packed = packed_whole("mxfp4", weight)
    assert packed.scales.flatten().tolist() == [127, 127, 117, 117]
    assert torch.equal(SCHEMES["mxfp4"].unpacked(packed, 2, 40), weight)


def test_initial_weights_are_rounded_ones_of_the_model_without_blocks() -> None:
    whole = dict(build_whole(llm(None), seed=3).named_parameters())
    for name, found in weights(build_whole(llm(), seed=3)).items():
        wanted = reference.ROUND["nf4"](whole[f"{name}.weight"])
        assert torch.equal(found, wanted), name
        assert 0 < F.mse_loss(found, whole[f"{name}.weight"]).sqrt() < 0.02 * 0.15


def test_layers_that_the_files_lack_stay_whole_and_get_no_adapter(tmp_path: Path) -> None:
    """BERT's pooler in a directory of hidden tokens is new, as the classifier is."""
    family = next(f for f in FAMILIES if f.architecture == "BertForMaskedLM")
    linear = AdapterPlan(rank=2, alpha=2.0, targets=("all-linear",))
    as_classifier = {"architectures": ["BertForSequenceClassification"]}
    bare = ModelPlan(target="", hf=str(family.make(tmp_path / "bert")), args=as_classifier)
    packed = build_whole(replace(bare, adapter=linear, quantize="nf4"), seed=3)
    plain = build_whole(bare, seed=3)
    new = plain.bert.pooler.dense.weight.clone()
    reference.round_(plain, "nf4")
    found = weights(packed)
    assert len(found) == 3 * 6
    for name, weight in found.items():
        assert torch.equal(weight, plain.get_submodule(name).weight), name
    assert torch.equal(plain.bert.pooler.dense.weight, new)
    assert adapters.adapted(packed).keys() == found.keys()


def test_a_layer_whose_model_casts_inputs_to_its_weights_dtype_is_refused() -> None:
    layer = packed_weights(build_whole(llm(), seed=0))["blocks.0.mlp.up.weight"].module
    with pytest.raises(Exception, match=r"model\.quantize=nf4: a layer gets torch\.uint8"):
        layer(torch.ones(1, 24).to(layer.weight.dtype))


def test_what_is_packed_cannot_train() -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.up\.weight.*packed"):
        freeze_(build(llm(), seed=0), FreezePlan(except_=("*.up.weight",)))
    whole = replace(llm(), adapter=None)
    with pytest.raises(ConfigError, match="whose weights are frozen"):
        build(whole, seed=0)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("adapter.name=null", "adapter.name"),
        ("model.target=mine:Model", "model.target"),
        ("train.compile=true", "train.compile"),
    ],
)
def test_what_cannot_be_combined_is_a_rule(setting: str, key: str) -> None:
    words = ["recipe=llm-tiny", "model.quantize=nf4", "adapter.name=lora"]
    with pytest.raises(ConfigError) as caught:
        plan_from([*words, "adapter.targets=[query]", setting], here=False)
    assert key in {problem.key for problem in caught.value.problems}


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"nf4.*int8"):
        plan_from(["recipe=llm-tiny", "model.quantize=nf5"])


def test_scales_of_bytes_survive_any_cast() -> None:
    packed = packed_whole("nf4", numbers())
    assert {tensor.dtype for tensor in packed} == {torch.uint8}
    rounded = SCHEMES["nf4"].unpacked(packed, 10, 15, torch.bfloat16)
    assert torch.equal(rounded, SCHEMES["nf4"].unpacked(packed, 10, 15).bfloat16())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_dora_on_packed_layers_is_pefts_on_what_the_blocks_stand_for(dropout: float) -> None:
    """Initial magnitudes, outputs and gradients by PEFT's own module, in float64."""
    dora = pytest.importorskip("peft.tuners.lora.dora")
    adapter = replace(LORA, name="dora", dropout=dropout)
    weight = packed_weights(build_whole(llm(adapter=adapter), seed=0))["blocks.0.mlp.down.weight"]
    layer, whole = weight.module, weight.whole(torch.float64)
    peft = dora.DoraLinearLayer(fan_in_fan_out=False)
    base = nn.Linear(40, 24, bias=False, dtype=torch.float64)
    base.weight = nn.Parameter(whole, requires_grad=False)
    zeros = torch.zeros(24, 3, dtype=torch.float64)
    a = layer.lora_A.weight.detach().double()
    peft.update_layer(base_layer=base, lora_A=a, lora_B=zeros, scaling=2.0)
    torch.testing.assert_close(layer.lora_magnitude_vector.weight.double(), peft.weight)
    for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
        part.double()
        nn.init.normal_(part.weight)
    own = [part.weight for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)]
    x = torch.randn(5, 40, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    found = layer(x)
    factors = torch.randn(found.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((found * factors).sum(), [x, *own])
    peft.weight.data.copy_(own[2])
    linears = [nn.Linear(*reversed(w.shape), bias=False, dtype=torch.float64) for w in own[:2]]
    for linear, value in zip(linears, own, strict=False):
        linear.weight.data.copy_(value)
    torch.manual_seed(4)
    dropped = layer.lora_dropout(x)
    parts = {"lora_A": linears[0], "lora_B": linears[1], "scaling": 2.0, "base_layer": base}
    known = None if dropout else base(x)
    wanted = base(x) + peft(dropped, **parts, base_result=known)
    of_parts = [linears[0].weight, linears[1].weight, peft.weight]
    wanted_gradients = torch.autograd.grad((wanted * factors).sum(), [x, *of_parts])
    for one, other in zip((found, *gradients), (wanted, *wanted_gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
