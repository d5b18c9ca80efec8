"""`adapter.merge`: one adapter trains on weights to which another one is added."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.dist import hf
from tests.dist.test_adapter_kinds import logits_of
from tests.dist.test_export_check import Export, checked, export  # noqa: F401  a fixture
from tests.dist.test_preferences import pairs  # noqa: F401  a fixture
from tests.running import Colotrain, losses

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
DPO = (
    *("data.path=pairs.jsonl", "data.chat_template=chatml", "data.seq_len=64"),
    *("train.objective=dpo", "train.eval_steps=all", "train.global_batch=8", "optim.lr=0.05"),
    *("checkpoint.content=trained", "optim.schedule.name=constant"),
    *("adapter.name=lora", "adapter.rank=2", "adapter.alpha=3", "adapter.targets=[q_proj,up_proj]"),
)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def write_adapter(base: Path, folder: Path, merged: Path) -> None:
    """Let PEFT write an adapter with random values, and the base to which it is added."""
    torch.manual_seed(2)
    ranks = {"rank_pattern": {"down_proj": 3}, "use_rslora": True, "lora_alpha": 5}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **ranks)
    model = peft.get_peft_model(load(base), config)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    shutil.copytree(base, merged)
    model.merge_and_unload().save_pretrained(merged)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_preferences_are_those_of_the_sum_and_the_export_goes_on_the_plain_base(
    pairs: Colotrain,  # noqa: F811
    export: Export,  # noqa: F811
) -> None:
    cwd = pairs.cwd
    base = hf.make_chat_directory(cwd / "base")
    write_adapter(base, cwd / "first", cwd / "sum")
    two = (*DPO, "plugin=zero3", "cluster.procs_per_node=2")
    on_sum = pairs.run(*two, f"model.hf={cwd / 'sum'}", "train.max_steps=4", "name=sum")
    beneath = (*two, f"model.hf={base}", "adapter.merge=[first]")
    whole = pairs.run(*beneath, "train.max_steps=4", "name=whole")
    assert losses(whole) == pytest.approx(losses(on_sum), abs=1e-5)
    pairs.run(*beneath, "train.max_steps=2", "name=run")
    assert losses(pairs.resume("run", "train.max_steps=4")) == losses(whole)
    checked(export, "run", "--to", "adapter", "--adapter")
    checked(export, "run", "--to", "merged")
    wanted = logits_of(cwd / "merged")
    with_adapter = peft.PeftModel.from_pretrained(load(base), cwd / "adapter").eval()
    assert (wanted - logits_of(with_adapter)).abs().max().item() < 1e-5
    assert (wanted - logits_of(cwd / "sum")).abs().max().item() > 1e-2
    assert (wanted - logits_of(cwd / "base")).abs().max().item() > 1e-2
    write_adapter(base, cwd / "second", cwd / "unused")
    stored = load_file(cwd / "second" / "adapter_model.safetensors")
    stored = {name: tensor * 2 for name, tensor in stored.items()}
    save_file(stored, cwd / "second" / "adapter_model.safetensors")
    result = pairs("resume", "run", "train.max_steps=5", "adapter.merge=[second]")
    assert result.code != 0
    assert "its adapters trained on weights that adapter.merge" in result.err
    save_file(stored, cwd / "first" / "adapter_model.safetensors")
    for options in ((), ("--adapter",)):
        result = pairs("export", "run", "--to", "changed", *options)
        assert result.code == 2
        assert "the run merged other adapters" in result.err


def test_what_cannot_be_merged_is_told_before_the_run(colotrain: Colotrain) -> None:
    base = hf.make_chat_directory(colotrain.cwd / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(load(base), config).save_pretrained(colotrain.cwd / "dora")
    other = hf.make_chat_directory(colotrain.cwd / "other", hidden_size=32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(load(other), config).save_pretrained(colotrain.cwd / "wide")
    for folder, line in (
        ("dora", "LoRA on linear layers alone (it has DoRA)"),
        ("wide", "lora_A.weight to be (2, 24), not (2, 32); give an adapter of this model"),
        ("none", "adapter.merge="),
    ):
        result = colotrain(
            *("plan", f"model.hf={base}", "data.target=tests.dist.hf:samples"),
            *("adapter.name=lora", "adapter.targets=[q_proj]", f"adapter.merge=[{folder}]"),
        )
        assert result.code == 2
        assert line in result.err
