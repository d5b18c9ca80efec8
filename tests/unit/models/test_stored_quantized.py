"""Directories that are stored quantized: the numbers that transformers and bitsandbytes read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colotrain.errors import ColotrainError, ConfigError
from colotrain.export.reader import dequantized
from colotrain.models.loading import build_whole
from colotrain.models.quantized.layers import packed_weights
from colotrain.models.quantized.stored import FORMATS, open_weights
from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import AdapterPlan, ModelPlan
from colotrain.verify.quantized import stored_values
from tests.dist.hf import GPT_OSS, make_chat_directory, make_directory, store_quantized

transformers = pytest.importorskip("transformers")
OF_BITSANDBYTES = Path(__file__).with_name("bitsandbytes.safetensors")
"""What bitsandbytes 0.50.2 made of 280 blocks, with double quantization and without, and of rows,
and under `NAME.expected` what it reads of them in float32."""
LORA = AdapterPlan(rank=2, alpha=4.0, targets=("q_proj",))


def gpt_oss(folder: Path) -> Path:
    make_chat_directory(folder, "gpt_oss", **GPT_OSS)
    store_quantized(folder, "mxfp4")
    return folder


def llama(folder: Path, method: str) -> Path:
    make_directory("llama", folder)
    store_quantized(folder, method)
    return folder


def parameters(folder: Path, **settings: Any) -> dict[str, Tensor]:
    plan = ModelPlan(target="", hf=str(folder), **settings)
    return dict(build_whole(plan, seed=0).named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_are_those_that_transformers_reads(dtype: str, tmp_path: Path) -> None:
    folder = gpt_oss(tmp_path / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    wanted = dict(load(folder, dtype=getattr(torch, dtype)).named_parameters())
    found = parameters(folder, args={"dtype": dtype})
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    values, name = stored_values(folder), "model.layers.1.mlp.experts.gate_up_proj"
    assert values is not None
    assert torch.equal(values[name].to(wanted[name].dtype), wanted[name])


def real_directory(folder: Path) -> dict[str, Tensor]:
    """The tensors of bitsandbytes in a directory; returns what they stand for."""
    stored = load_file(OF_BITSANDBYTES)
    ends = ".expected"
    wanted = {n.removesuffix(ends): stored.pop(n) for n in [*stored] if n.endswith(ends)}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


def test_codes_stand_for_what_bitsandbytes_reads(tmp_path: Path) -> None:
    """bitsandbytes multiplies int8 by a rounded 1/127: within two units in the last place."""
    wanted = real_directory(tmp_path / "model")
    assert wanted.keys() == {"plain.weight", "nested.weight", "rows.weight"}
    files = open_weights(tmp_path / "model")
    assert {*files} == wanted.keys()
    values = stored_values(tmp_path / "model")
    assert values is not None
    for name, tensor in wanted.items():
        assert files.shape(name) == tuple(tensor.shape)
        exact = 0.0 if name != "rows.weight" else 3e-7
        for found in (files.rows(name), values[name], dequantized(tmp_path / "model")[name]):
            assert (found - tensor).abs().max() <= exact * tensor.abs().max()


@pytest.mark.parametrize("method", ["mxfp4", "nf4", "int8"])
def test_any_rows_are_those_of_the_whole(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    files = open_weights(gpt_oss(folder) if method == "mxfp4" else llama(folder, method))
    values = stored_values(folder)
    assert values is not None
    assert values.keys() == {*files}
    for name, whole in values.items():
        for start in range(0, len(whole), max(len(whole) // 3, 1)):
            for count in (1, 5):
                rows = files.rows(name, start, count)
                assert torch.equal(rows, whole[start : start + count]), name
        assert math.prod(files.shape(name)) == whole.numel()


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_layers_and_the_parts_of_the_check_agree(method: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", method)
    found, wanted = parameters(folder), dequantized(folder)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_blocks_packed_again_are_those_that_are_stored(tmp_path: Path) -> None:
    """Where each block has its largest number: bitsandbytes makes no other."""
    folder = llama(tmp_path / "model", "nf4")
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if f"{name}.absmax" in stored]:
        stored[name][::32] |= 15
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    plan = ModelPlan(target="", hf=str(folder), adapter=LORA, quantize="nf4")
    weights = packed_weights(build_whole(plan, seed=0))
    assert weights
    for name, weight in weights.items():
        codes = stored[name].flatten()
        assert torch.equal(weight.packed.codes.flatten()[: len(codes)], codes), name
        assert torch.equal(weight.whole(), open_weights(folder).rows(name)), name


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", "nf4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"mxfp4 or bitsandbytes.*names gptq"):
        parameters(folder)


def test_scales_of_another_dtype_are_not_taken_for_bytes(tmp_path: Path) -> None:
    shape = (2, 3, 1, 16)
    tensors = {
        "experts.down_proj_blocks": torch.zeros(shape, dtype=torch.uint8),
        "experts.down_proj_scales": torch.zeros(shape[:3], dtype=torch.uint8),
    }
    for dtype in (torch.uint8, torch.float8_e8m0fnu, torch.float32):
        tensors["experts.down_proj_scales"] = torch.ones(shape[:3]).to(dtype)
        save_file(tensors, tmp_path / "model.safetensors")
        files = StoredTensors([tmp_path / "model.safetensors"])
        if dtype is torch.uint8:
            assert len([*FORMATS["mxfp4"](files)]) == 1
            continue
        with pytest.raises(ColotrainError, match="blocks of 16 bytes with a scale each"):
            [*FORMATS["mxfp4"](files)]


@pytest.mark.parametrize("change", ["shape", "absmax", "json", "format", "map"])
def test_what_is_no_such_tensor_is_refused_by_its_name(change: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", "int8" if change == "format" else "nf4")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    stored, state = load_file(path), f"{name}.quant_state.bitsandbytes__nf4"
    if change == "format":
        stored[f"{name}_format"] = torch.tensor(1, dtype=torch.uint8)
    elif change == "map":
        stored[f"{name}.quant_map"] = stored[f"{name}.quant_map"].to(torch.int32)
    elif change == "absmax":
        stored[f"{name}.absmax"] = stored[f"{name}.absmax"][1:].clone()
    else:
        text = bytes(stored[state].tolist()).replace(b"[40", b"[41" if change == "shape" else b"40")
        stored[state] = torch.tensor([*text]).byte()
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ColotrainError, match=r"layers\.0\.mlp\.up_proj.*expected"):
        parameters(folder)
