"""Words of other tools are told what they are called here."""

from __future__ import annotations

import re

import pytest

from colotrain.cli.main import guarded
from colotrain.config.hints import KEYS, VALUES
from colotrain.config.schema import Config
from colotrain.records import leaves
from colotrain.spec.plugins import ROWS


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("plugin=fsdp", "plugin=zero3 shards all (FULL_SHARD)"),
        ("plugin=ddp", "take plugin=zero1"),
        ("plugin.name=DeepSpeed", "take plugin=zero1, zero2, zero3, or gemini"),
        ("train.lr=1e-3", "write optim.lr"),
        ("lr=1e-3", "write optim.lr"),
        ("train.batch_size=8", "train.global_batch (samples per step over all ranks) or"),
        ("train.num_workers=2", "write data.num_workers"),
        ("train.num_epochs=3", "write train.epochs"),
        ("train.precision=bf16-mixed", "write train.precision=bf16"),
        ("optim.name=adam", "optim.name=adamw with optim.weight_decay=0"),
        ("model.hf=meta-llama/Llama-3.2-1B", "names are not downloaded: give a directory"),
    ],
)
def test_a_word_of_another_tool_is_told_its_own(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["plan", "recipe=llm-tiny", word]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if word.split("=")[0] in line]
    assert any(hint in line for line in lines), lines


def test_hints_name_keys_and_plugins_that_exist() -> None:
    known = {*leaves(Config), *(key.rpartition(".")[0] for key in leaves(Config))}
    texts = [*KEYS.values(), *(text for table in VALUES.values() for text in table.values())]
    named = {key for text in texts for key in re.findall(r"\b[a-z]+\.[a-z_.]*[a-z_]", text)}
    assert named - known == set()
    plugins = {name for text in texts for name in re.findall(r"plugin=([\w-]+)", text)}
    assert plugins <= set(ROWS)
    assert not {key for key in KEYS if key in leaves(Config)}
