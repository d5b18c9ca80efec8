"""Words of other tools are told what they are called here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colotrain.cli.main import guarded, verbs
from colotrain.cli.options import VERBS
from colotrain.config.hints import KEYS, VALUES
from colotrain.config.schema import Config
from colotrain.records import leaves
from colotrain.rundir import RUNS, RunDir
from colotrain.runs.resolving import resolve_config
from colotrain.runs.trust import write_signed
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
        ("train.warmup_ratio=0.1", "write optim.schedule.warmup_ratio"),
        ("monitor=accuracy", "write checkpoint.best.metric, and checkpoint.best.mode"),
        ("checkpoint.monitor=accuracy", "write checkpoint.best.metric"),
        ("warmup=0.1", "or optim.schedule.warmup_ratio for a share"),
        ("data.drop_last=true", "write train.last_batch=drop"),
        ("train.max_step=3", "did you mean train.max_steps or train.eval_steps?"),
        ("optim.name_=3", "did you mean optim.name"),
        ("model.name_or_path=x", "write model.hf=DIRECTORY"),
        ("plugin.offload=cpu", "take plugin=gemini"),
        ("offload_optimizer=cpu", "take plugin=gemini"),
        ("plugin.offload_param=cpu", "take plugin=gemini"),
        ("cpu_offload=true", "take plugin=gemini"),
    ],
)
def test_a_word_of_another_tool_is_told_its_own(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["plan", "recipe=llm-tiny", word]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if word.split("=")[0] in line]
    assert any(hint in line for line in lines), lines


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("run recipe=llm-tiny --learning-rate 1e-3", "--learning-rate; {} write optim.lr=1e-3"),
        ("submit --lr=1e-3 recipe=llm-tiny", "--lr; {} write optim.lr=1e-3"),
        ("plan --lr --json", "--lr; {} write optim.lr"),
        ("run --nproc_per_node=2", "--nproc_per_node; {} write cluster.procs_per_node=2"),
        ("run --batch-size 8", "--batch-size; {} write train.global_batch (samples per step over"),
        ("run --config mine.yaml", "--config; {} write recipe=mine.yaml"),
        ("run --recipe llm-tiny", "--recipe; {} write recipe=llm-tiny"),
        ("inspect-grads --plugin zero2", "--plugin; {} write plugin=zero2"),
        ("data inspect --seq-len 8", "--seq-len; {} write data.seq_len=8"),
        ("verify --train.max_steps=3", "--train.max_steps; {} write train.max_steps=3"),
        ("run --target m:f", "--target; {} write model.target or data.target"),
        ("runs --lr 3", "--lr"),
        ("run --nonsense 3", "--nonsense; see `colotrain run --help`"),
    ],
)
def test_an_option_of_another_tool_is_told_its_setting(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(words.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    told = re.sub(r"`\S+ ", "`colotrain ", told)
    assert told.startswith(f"error: No such option: {line.format('settings are KEY=VALUE:')}")
    assert ("KEY=VALUE" in told) == ("{}" in line)


def test_a_verb_of_another_tool_is_told_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, own in VERBS.items():
        assert guarded([verb, "mine"]) == 2
        assert re.search(f"No such command '{verb}'; write `.*{own}`", capsys.readouterr().err)
        assert own.split()[0] in verbs()


def test_settings_beside_a_run_are_planned_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = resolve_config(["recipe=llm-tiny", "name=mine"])
    rundir = RunDir(RUNS / "mine")
    rundir.create()
    write_signed(made.plan, rundir, made.config)
    assert guarded(["plan", "mine", "train.max_steps=7"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: mine: a run is shown as it was, without settings beside it;")
    command = re.search("`colotrain (.*) KEY=VALUE`", told)
    assert command is not None
    changed = resolve_config([*command[1].split()[1:], "train.max_steps=7"]).plan
    assert (changed.name, changed.train.max_steps) == ("mine", 7)


def test_hints_name_keys_and_plugins_that_exist() -> None:
    known = {*leaves(Config), *(key.rpartition(".")[0] for key in leaves(Config))}
    texts = [*KEYS.values(), *(text for table in VALUES.values() for text in table.values())]
    named = {key for text in texts for key in re.findall(r"\b[a-z]+\.[a-z_.]*[a-z_]", text)}
    assert named - known == set()
    plugins = {name for text in texts for name in re.findall(r"plugin=([\w-]+)", text)}
    assert plugins <= set(ROWS)
    assert not {key for key in KEYS if key in leaves(Config)}
