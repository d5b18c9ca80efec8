"""Experts in one parameter that are held as blocks, against plain experts of their values."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.models.huggingface_match import sources_of
from colotrain.models.loading import build_on_meta, build_whole
from colotrain.models.quantized.filling import packed_rows
from colotrain.models.quantized.layers import dequantize_, packed_weights
from colotrain.models.quantized.schemes import SCHEMES
from colotrain.models.quantized.stored import open_weights
from colotrain.models.quantized.weights import PackedWeight
from colotrain.planner.traced.tracing import trace
from colotrain.spec.plan import AdapterPlan, ModelPlan
from colotrain.verify import quantized as reference
from tests.dist.hf import GPT_OSS, make_chat_directory, store_quantized
from tests.families import FAMILIES
from tests.unit.models.test_stored_quantized import gpt_oss

transformers = pytest.importorskip("transformers")
LORA = AdapterPlan(rank=2, alpha=4.0, targets=("q_proj",))
ON_BOTH = replace(LORA, parameters=("gate_up_proj", "down_proj"))
DOWN = "model.layers.0.mlp.experts.down_proj"


def make(architecture: str, folder: Path) -> str:
    if architecture == "GptOssForCausalLM":
        return str(gpt_oss(folder))
    return str(next(f for f in FAMILIES if f.architecture == architecture).make(folder))


def trained(model: nn.Module, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model, whose adapters get random values."""
    draws = torch.Generator().manual_seed(1)
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for parameter in found.values():
        nn.init.normal_(parameter, std=0.1, generator=draws)
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    ids = torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids)[0]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in found.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("implementation", "recompute"),
    [("eager", "none"), ("grouped_mm", "none"), ("grouped_mm", "full")],
)
@pytest.mark.parametrize("adapter", [LORA, ON_BOTH], ids=["layers", "experts"])
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("GptOssForCausalLM", "mxfp4"),
        ("Qwen3MoeForCausalLM", "nf4"),
        ("MixtralForCausalLM", "int8"),
    ],
)
def test_gradients_are_those_of_plain_experts_and_no_stack_outlives_its_forward(
    architecture: str,
    scheme: str,
    adapter: AdapterPlan,
    implementation: str,
    recompute: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make(architecture, tmp_path / "model")
    plan = ModelPlan(target="", hf=folder, adapter=adapter, quantize=scheme)
    packed, plain = (build_whole(plan, seed=0) for _ in range(2))
    dequantize_(plain)
    assert not packed_weights(plain)
    names = {n for n in packed_weights(packed) if n.endswith(("gate_up_proj", "down_proj"))}
    assert len(names) == 2 * packed.config.num_hidden_layers
    alive: list[int] = []
    storages: list[Any] = []

    def unpack(weight: PackedWeight, *args: Any) -> Tensor:
        found = own(weight, *args)
        if len(weight.shape) == 3:
            alive.append(sum(ref() is not None for ref in storages))
            storages.append(weakref.ref(found.untyped_storage()))
        return found

    own = PackedWeight.whole
    monkeypatch.setattr(PackedWeight, "whole", unpack)
    checkpoint_blocks_(packed, recompute)
    wanted = trained(plain, implementation)
    found = trained(packed, implementation)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=2e-6)
    assert max(alive) <= 1, "another layer's experts are still there"
    for weight in packed_weights(packed).values():
        assert weight.packed.codes.dtype == torch.uint8


def test_blocks_of_a_directory_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    """Those that packing would write otherwise included: the largest number of a block is small."""
    folder = gpt_oss(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    plan = ModelPlan(target="", hf=str(folder), adapter=LORA, quantize="mxfp4")
    model = build_whole(plan, seed=0)
    weight = packed_weights(model)[DOWN]
    blocks, scales = (stored[f"{DOWN}_{kind}"] for kind in ("blocks", "scales"))
    assert torch.equal(weight.packed.codes, blocks.flatten(0, 2))
    assert torch.equal(weight.packed.scales, scales.view(-1, 1))
    values = reference.stored_values(folder)
    assert values is not None
    assert torch.equal(weight.whole(), values[DOWN])
    files, source = open_weights(folder), sources_of(model).found[DOWN]
    for begin in range(0, len(weight.packed.codes), 37):
        num = min(37, len(weight.packed.codes) - begin)
        part = packed_rows(weight, files, source, begin=begin, num=num)
        assert torch.equal(part.codes, weight.packed.codes[begin : begin + num])
        assert torch.equal(part.scales, weight.packed.scales[begin : begin + num])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_alone_and_ranks_parts_are_those_of_the_whole_stack(
    scheme: str, transposed: bool
) -> None:
    """Also where blocks of 64 have numbers of two experts, and 32 do not divide a row."""
    stack = torch.randn(5, 7, 39)
    module = nn.Module()
    module.stack = nn.Parameter(stack.clone(), requires_grad=False)
    kind = SCHEMES[scheme]
    held = PackedWeight(
        module=module,
        key="stack",
        scheme=kind,
        shape=tuple(stack.shape),
        is_transposed=transposed,
        dtype=torch.float32,
    )
    held.hold_blocks_()
    source: Any = _Entries(stack)
    num = len(held.packed.codes)
    packed = packed_rows(held, source, source, begin=0, num=num)
    rows = [expert.T if transposed else expert for expert in stack]
    rounded = reference.ROUND[scheme](torch.cat(rows)).split(len(rows[0]))
    wanted = torch.stack([expert.T if transposed else expert for expert in rounded])
    assert torch.equal(held.whole(packed=packed), wanted)
    for start in range(5):
        for end in range(start + 1, 6):
            found = held.entries(packed, start, end, torch.float32)
            assert torch.equal(found, wanted[start:end])
    source.most = 0
    for begin in range(0, num, 3):
        part = packed_rows(held, source, source, begin=begin, num=min(3, num - begin))
        assert torch.equal(part.codes, packed.codes[begin : begin + 3])
        assert torch.equal(part.scales, packed.scales[begin : begin + 3])
    assert source.most <= 2


class _Entries:
    """A stack in files, and the most experts that were read at once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.most = tensor, 0

    def rows(self, _: object, start: int, count: int) -> Tensor:
        self.most = max(self.most, count)
        return self.tensor[start : start + count]


def test_a_forward_that_fails_leaves_blocks_in_place(tmp_path: Path) -> None:
    plan = ModelPlan(
        target="", hf=str(gpt_oss(tmp_path / "model")), adapter=ON_BOTH, quantize="nf4"
    )
    module = packed_weights(build_whole(plan, seed=0))[DOWN].module
    before = dict(module._parameters)
    with pytest.raises(RuntimeError):
        module(torch.ones(3, 5), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    assert all(module._parameters[key] is value for key, value in before.items())
    x = torch.ones(1, requires_grad=True)
    assert isinstance((x * x).grad_fn._saved_self, Tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize(("adapter", "recompute"), [(LORA, "none"), (ON_BOTH, "full")])
def test_the_plans_trace_has_the_layer_that_is_unpacked(
    adapter: AdapterPlan, recompute: Any, tmp_path: Path
) -> None:
    """Against what torch's profiler saw allocated in a forward and a backward: within 5 %."""
    sizes = GPT_OSS | {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 16}
    make_chat_directory(tmp_path / "model", "gpt_oss", **sizes)
    store_quantized(tmp_path / "model", "mxfp4")
    plan = ModelPlan(target="", hf=str(tmp_path / "model"), adapter=adapter, quantize="mxfp4")
    model, ids = build_whole(plan, seed=0), torch.arange(64).view(2, 32)
    checkpoint_blocks_(model, recompute)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        model(input_ids=ids, labels=ids)[0].backward()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    on_meta = build_on_meta(plan)
    assert on_meta is not None
    traced = trace(
        on_meta,
        {"input_ids": ids[0], "labels": ids[0]},
        precision="fp32",
        checkpointing=recompute,
        device="cpu",
        micro_batch=2,
    )
    sizes_of = traced.storages
    planned = [
        sizes_of[n] if n >= 0 else -sizes_of[-1 - n] for s in traced.segments for n in s.events
    ]
    assert max(accumulate(planned)) == pytest.approx(max(accumulate(changes)), rel=0.05)
    layer = 16 * 128 * 3 * 128 * 4
    assert layer < max(accumulate(planned)) < 3 * layer + 4 * 2**20
