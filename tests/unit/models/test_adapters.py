"""Adapters: where they go, what they begin as, and what goes in and out in PEFT's format."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from colotrain.config.adapter import check_adapter, check_brought, plan_adapter
from colotrain.config.checks import values_of
from colotrain.config.compose import gather
from colotrain.config.schema import Adapter, Config
from colotrain.engine.sharding.grouping import find_groups
from colotrain.errors import ConfigError, Problem
from colotrain.models import adapters
from colotrain.models.loading import build, build_whole
from colotrain.records import from_plain
from colotrain.spec.plan import AdapterPlan, ModelPlan

LLM = {"vocab_size": 32, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_hidden": 24}


def plan(*targets: str, **changes: Any) -> AdapterPlan:
    return AdapterPlan(**{"rank": 3, "alpha": 6.0, "targets": targets, **changes})


def llm(adapter: AdapterPlan | None) -> ModelPlan:
    return ModelPlan(target="colotrain.models.llm:LLM", args=LLM, adapter=adapter)


def test_adapters_train_and_everything_else_is_frozen() -> None:
    model = build(llm(plan("query", "blocks.1.mlp.*")), seed=0)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    layers = ["blocks.0.attention.query", "blocks.1.attention.query"]
    layers += [f"blocks.1.mlp.{name}" for name in ("gate", "up", "down")]
    assert trained == {f"{name}.lora_{part}.weight" for name in layers for part in "AB"}
    assert all(p.is_meta for p in model.parameters())


def test_names_of_the_model_itself_do_not_change() -> None:
    with_adapters = build(llm(plan("*mlp*")), seed=0)
    names = [n for n, _ in with_adapters.named_parameters() if ".lora_" not in n]
    assert names == [n for n, _ in build(llm(None), seed=0).named_parameters()]


def test_a_new_adapter_changes_nothing_and_its_values_depend_on_seed_and_name_only() -> None:
    ids = torch.randint(32, (2, 5))
    bare = build_whole(llm(None), seed=4)
    one, two = build_whole(llm(plan("*.1.*")), seed=4), build_whole(llm(plan("*")), seed=4)
    assert torch.equal(bare(ids), one(ids))
    assert torch.equal(bare(ids), two(ids))
    values = dict(two.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, values[name]), name
    a = values["blocks.0.mlp.up.lora_A.weight"]
    assert 0 < a.abs().max().item() <= 1 / math.sqrt(16)  # uniform, as nn.Linear draws
    other = dict(build_whole(llm(plan("*")), seed=5).named_parameters())
    assert not torch.equal(a, other["blocks.0.mlp.up.lora_A.weight"])


@pytest.mark.parametrize("transposed", [False, True])
def test_an_adapted_layer_computes_the_sum_and_merging_does_too(transposed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4))
    if transposed:
        pytest.importorskip("transformers")
        from transformers.pytorch_utils import Conv1D

        model = nn.Sequential(Conv1D(4, 5))
    bare = copy.deepcopy(model)
    adapters.attach_(model, plan("0"))
    layer: Any = model[0]
    nn.init.normal_(layer.lora_B.weight)
    a, b, x = layer.lora_A.weight, layer.lora_B.weight, torch.randn(3, 5)
    assert (a.shape, b.shape) == ((3, 5), (4, 3))
    expected = bare(x) + x @ a.T @ b.T * 2.0
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert adapters.is_transposed(layer) == transposed
    with torch.no_grad():
        merged = adapters.merged(layer.weight, a, b, scale=2.0, transposed=transposed)
        bare[0].weight.copy_(merged)  # type: ignore[operator]
    assert torch.allclose(bare(x), expected, atol=1e-5)


def test_dropout_is_of_the_adapters_input_and_of_training_only() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    adapters.attach_(model, plan("0", dropout=0.5))
    layer: Any = model[0]
    nn.init.ones_(layer.lora_B.weight)
    x = torch.randn(8, 64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_a_target_that_names_no_linear_layer_is_an_error_with_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        build(llm(plan("q_proj", "quary")), seed=0)
    lines = caught.value.lines()
    assert lines[0].startswith("error: adapter.targets=q_proj: expected a glob on linear layers")
    assert lines[1].endswith("did you mean query?")


def test_layers_that_are_not_called_or_do_more_than_multiply_are_no_targets() -> None:
    assert not dict(adapters.linear_layers(nn.MultiheadAttention(8, 2)))
    assert "head" not in dict(adapters.linear_layers(build(llm(None), seed=0)))  # it gives a loss


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ({"rank": 4}, "adapter.rank=4: expected nothing without adapter.name"),
        ({"name": "lora"}, "adapter.targets: expected globs on the names of linear layers"),
        ({"name": "lora", "targets": ["*"], "rank": 0}, "adapter.rank=0: expected 1 or more"),
        ({"name": "lora", "targets": ["*"], "alpha": -1.0}, "adapter.alpha=-1.0: expected a"),
        ({"name": "lora", "targets": ["*"], "dropout": 1.0}, "adapter.dropout=1.0: expected"),
    ],
)
def test_wrong_settings_are_told_in_a_line(written: dict[str, Any], line: str) -> None:
    (problem,) = check_adapter(Adapter(**written))
    assert str(problem).startswith(line)


def peft_folder(folder: Path, **changes: Any) -> Path:
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    names = [f"base_model.model.blocks.0.mlp.up.lora_{part}.weight" for part in "AB"]
    tensors = {names[0]: torch.full((3, 16), 0.5), names[1]: torch.full((24, 3), 0.25)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, **written: Any) -> tuple[AdapterPlan | None, list[Problem]]:
    problems: list[Problem] = []
    found = plan_adapter(Adapter(name="lora", path=str(folder), **written), problems)
    return found, problems


def test_pefts_directory_says_rank_alpha_and_layers(tmp_path: Path) -> None:
    found, problems = read(peft_folder(tmp_path))
    assert not problems
    assert found == plan("blocks.0.mlp.up", alpha=12.0, path=str(tmp_path))
    model = build_whole(llm(found), seed=0)
    values = dict(model.named_parameters())
    assert (values["blocks.0.mlp.up.lora_A.weight"] == 0.5).all()
    assert (values["blocks.0.mlp.up.lora_B.weight"] == 0.25).all()


def test_settings_that_leave_the_sum_alone_are_taken(tmp_path: Path) -> None:
    empty = {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "of_a_later": None}
    kept = {"init_lora_weights": "gaussian", "layers_to_transform": [0], "lora_dropout": 0.25}
    folder = peft_folder(tmp_path, **empty, **kept)
    found, problems = read(folder)
    assert not problems
    assert found is not None
    assert found.dropout == 0.25
    other, _ = read(folder, dropout=0.0)
    assert other is not None
    assert other.dropout == 0.0


def test_an_adapter_of_another_model_is_refused_when_the_model_is_built(tmp_path: Path) -> None:
    found, _ = read(peft_folder(tmp_path))
    other = ModelPlan(target="colotrain.models.llm:LLM", args={**LLM, "d_model": 8}, adapter=found)
    with pytest.raises(ConfigError, match=r"adapter\.path=.*lora_A\.weight to be \(3, 8\), not"):
        build(other, seed=0)


def test_rank_stabilised_scaling_is_taken(tmp_path: Path) -> None:
    found, _ = read(peft_folder(tmp_path, use_rslora=True))
    assert found is not None
    assert found.scale_of("blocks.0.mlp.up") == pytest.approx(12 / math.sqrt(3))


@pytest.mark.parametrize(
    ("changes", "written", "line"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type to be LORA in its adapter_config.json, not IA3"),
        ({"use_dora": True}, {}, "it lacks base_model.model.blocks.0.mlp.up.lora_magnitude_vector"),
        ({"modules_to_save": "lm_head"}, {}, "modules_to_save is no list of names"),
        ({"init_lora_weights": "loftq"}, {}, "init_lora_weights to be True or False or gaussian"),
        ({"init_lora_weights": "mica"}, {}, "in its adapter_config.json, not mica"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "each loading gives other weights"),
        ({"init_lora_weights": "corda"}, {}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, {}, "PEFT loads it on the whole weights"),
        ({"init_lora_weights": "pissa"}, {"init": "olora"}, "adapter.init=olora: expected pissa"),
        ({"alora_invocation_tokens": [3, 4]}, {}, "alora_invocation_tokens to be nothing"),
        ({"rank_pattern": {"up": 2}}, {}, "matrices of its rank 2 (base_model.model.blocks.0.mlp."),
        ({"rank_pattern": {"(": 2}}, {}, "rank_pattern: (: "),
        ({"alpha_pattern": {"up": 0}}, {}, "alpha_pattern has 0"),
        ({}, {"rslora": True}, "adapter.rslora=true: expected False, as in adapter.path"),
        ({}, {"ranks": {"*": 2}}, "nothing beside adapter.path"),
        ({"of_a_later_version": 0.5}, {}, "of_a_later_version to be nothing"),
        ({"r": 4}, {}, "matrices of its rank 4 (base_model.model.blocks.0.mlp.up.lora_A.weight"),
        ({}, {"rank": 8}, "adapter.rank=8: expected 3, as in adapter.path"),
        ({}, {"targets": ["*"]}, "nothing beside adapter.path"),
        ({"r": "many"}, {}, "a directory in PEFT's format"),
        ({"r": 0}, {}, "adapter_config.json: r is 0"),
        ({"lora_alpha": 0}, {}, "lora_alpha is 0"),
        ({"lora_alpha": math.nan}, {}, "lora_alpha is nan"),
        ({"lora_dropout": 1.5}, {}, "lora_dropout is 1.5"),
        ({"lora_dropout": "much"}, {}, "a directory in PEFT's format"),
        ({"rank_pattern": ["up"]}, {}, "rank_pattern is no object"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], written: dict[str, Any], line: str
) -> None:
    _, problems = read(peft_folder(tmp_path, **changes), **written)
    assert any(line in str(problem) for problem in problems)


def test_whole_numbers_are_no_values_of_an_adapter(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    found, problems = read(folder)
    assert not problems
    with pytest.raises(ConfigError, match=r"lora_A\.weight in floating point, not I8"):
        build(llm(found), seed=0)


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        ([], ["adapter.dropout=0.5: expected null or 0 with adapter.parameters"]),
        (["train.compile=true"], ["adapter.dropout=", "train.compile=true: expected false"]),
        (["adapter.dropout=0", "model.quantize=nf4"], []),
    ],
)
def test_rules_hold_for_what_an_adapters_directory_brings(
    tmp_path: Path, args: list[str], lines: list[str]
) -> None:
    changes = {"lora_dropout": 0.5, "target_parameters": ["up"]}
    written = ("adapter.name=lora", f"adapter.path={peft_folder(tmp_path, **changes)}", *args)
    settings = from_plain(Config, gather(["recipe=llm-tiny", *written])[0])
    found = plan_adapter(settings.adapter, [])
    assert found is not None
    problems = [str(problem) for problem in check_brought(values_of(settings), found)]
    assert len(problems) == len(lines), problems
    assert all(line in problem for line, problem in zip(lines, problems, strict=True)), problems


def test_a_layer_with_an_adapter_can_be_split_from_its_block() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model = build(llm(plan("*mlp*", "query")), seed=0)
    batch = {"input_ids": ids, "labels": ids}
    groups = find_groups(model, chunk_bytes=2048, batch=batch, split=True)
    names = [name for name, _ in groups]
    assert any("mlp" in name for name in names)
    grouped = [p for _, modules in groups for module in modules for p in module.parameters()]
    assert {id(p) for p in grouped} <= {id(p) for p in model.parameters()}
