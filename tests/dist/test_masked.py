"""Masked language modelling: gradients of plain transformers, and exact after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from colotrain.errors import ConfigError
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS
from tests.dist import plain
from tests.families import OTHERS, Family
from tests.masked import make_tokenizer, write_texts
from tests.representatives import representatives
from tests.running import Colotrain, losses

pytest.importorskip("transformers")
NAMES = ("BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM")
BERT_, ROBERTA, MODERN = (
    next(family for family in OTHERS if family.architecture == name) for name in NAMES
)
CASES = {
    "bert-zero3": (BERT_, ["zero3"]),
    "bert-cp": (BERT_, ["zero2", "gemini"]),
    "bert": (BERT_, [name for name in ROWS if name != "zero3"]),
    "modernbert": (MODERN, [*ROWS]),
    "roberta": (ROBERTA, ["gemini"]),
}
"""Name → architecture, and the plugins under which it is trained."""
TEXT = ("data.path=text.jsonl", "data.seq_len=24", "train.global_batch=8", "train.micro_batch=2")
MASKED = (*TEXT, "train.objective=masked")


@pytest.fixture
def texts(colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch) -> Colotrain:
    write_texts(colotrain.cwd / "text.jsonl", 120)
    monkeypatch.chdir(colotrain.cwd)
    return colotrain


def make(family: Family, folder: Path) -> Path:
    make_tokenizer(family.make(folder), "roberta" if family.kind == "roberta" else "bert")
    return folder


@pytest.mark.parametrize("case", representatives(CASES, kept=["bert-zero3", "bert-cp"]))
def test_every_plugin_trains_as_plain_transformers_without_padding(
    case: str, texts: Colotrain
) -> None:
    """The reference computes each sample by itself: padding in a batch must change nothing."""
    family, plugins = CASES[case]
    folder = make(family, texts.cwd / "model")
    words = (f"model.hf={folder}", *MASKED, "data.packing=none", "data.shuffle=false")
    words = (*words, "train.masking.probability=0.3", "train.grad_clip=null", "optim.name=sgd")
    words = (*words, "optim.lr=0.2", "optim.schedule.name=constant", "train.max_steps=2")
    words = (*words, "cluster.procs_per_node=2", *["mesh.cp=2"] * case.endswith("cp"))
    plans = [plan_from([*words, f"plugin={name}"]) for name in plugins]
    results = plain.compare(family, folder, texts.cwd / "cases", plans)
    assert not [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert 0.0 < max(result.max_abs_gradient for result in results) <= 1e-6


@pytest.mark.slow
def test_a_resumed_run_hides_the_same_tokens(texts: Colotrain) -> None:
    folder = make(BERT_, texts.cwd / "model")
    words = (f"model.hf={folder}", *MASKED, "plugin=zero2", "cluster.procs_per_node=2")
    words = (*words, "optim.lr=0.01", "train.max_steps=24", "train.eval_every=12")
    words = (*words, "train.eval_steps=all", "checkpoint.every=12", "checkpoint.keep=9")
    whole = texts.run(*words, "name=whole")
    found = losses(whole)
    assert found[-1] < found[0]
    place = texts.rundir("whole").checkpoints / "step-00000012"
    ahead = ("data.num_workers=1", f"checkpoint.resume={place}", "name=rest")
    rest = texts.run(*words, *ahead)
    assert losses(rest)[-12:] == found[-12:]
    assert rest["validation_loss"] == whole["validation_loss"]
    evaluations = [e.fields for e in texts.events("whole") if e.kind == "eval"]
    counts = {fields["tokens"] for fields in evaluations}
    assert len(evaluations) == 3
    assert len(counts) == 1  # the same tokens are hidden in each


def test_what_cannot_hide_tokens_is_said_in_one_line(texts: Colotrain) -> None:
    folder = make(BERT_, texts.cwd / "model")

    def line(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            plan_from([*words, "train.max_steps=1"])
        (found,) = caught.value.lines()
        return found

    assert "set train.objective=masked, which hides tokens" in line(f"model.hf={folder}", *TEXT)
    found = line(f"model.hf={folder}", *MASKED, "data.tokenizer=bytes")
    assert found.startswith("error: data.tokenizer=bytes: expected a tokenizer with a mask token")
    found = line("recipe=llm-tiny", "data.corpus=null", *MASKED, f"data.tokenizer={folder}")
    assert "expected a masked language model" in found
    for words in (
        ("data.seq_len=2",),
        ("data.isolate=true",),
        ("train.masking.probability=1.5",),
        ("data.path=null", "data.target=tests.families:masked"),
    ):
        key = words[-1]
        assert line(f"model.hf={folder}", *MASKED, *words).startswith(f"error: {key}:")
    other = make(ROBERTA, texts.cwd / "other")  # its positions begin after that of padding
    found = line(f"model.hf={other}", *MASKED, "data.seq_len=64")
    assert found.startswith("error: data.seq_len=64: expected at most 63")
    plan = plan_from([f"model.hf={folder}", *MASKED])
    assert plan.data.masked is not None
    assert plan.data.masked.mask_id == 4
