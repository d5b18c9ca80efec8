"""`colotrain data inspect`: counts, lengths and a sample, for people and as JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.data import _visible
from colotrain.cli.main import guarded

RECIPE = ["recipe=llm-tiny", "data.corpus=null", "data.validation_fraction=0.25"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    return tmp_path


def chat(path: Path, count: int = 40) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"It is {i}."},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert guarded(["data", "inspect", *RECIPE, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_sample_shows_exactly_what_is_learned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(folder / "chat.jsonl")
    settings = ("data.path=chat.jsonl", "data.chat_template=chatml")
    found = inspect(capsys, *settings, "--sample", "5")

    (part,) = found["parts"]
    assert (part["format"], part["packing"], part["bad"]["count"]) == ("jsonl", "none", 0)
    assert part["documents"]["train"] + part["documents"]["validation"] == 40
    assert found["samples"] == part["documents"]
    assert sum(row["count"] for row in part["lengths"]["bins"]) == part["documents"]["train"]
    sample = found["sample"]
    asked, answer, after = sample["segments"]
    number = asked["text"].partition("What is ")[2].partition("?")[0]
    assert (
        asked["text"] == f"<|im_start|>user\nWhat is {number}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer == {"text": f"It is {number}.<|im_end|>", "in_loss": True, "document": None}
    assert after["text"] == "\n"
    assert sample["in_loss"] == len(answer["text"])
    assert sample["padding"] == 256 - len(asked["text"]) - len(answer["text"]) - 1

    assert guarded(["data", "inspect", *RECIPE, *settings, "--sample", "5"]) == 0
    assert f"[[It is {number}.<|im_end|>]]" in capsys.readouterr().out


def test_both_answers_of_a_pair_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}.", "rejected": "many"} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("data.path=pairs.jsonl", "train.objective=dpo", "data.seq_len=16")
    found = inspect(capsys, *settings)
    segments = found["sample"]["segments"]
    number = int(segments[0]["text"].removesuffix("+1="))
    assert [(s["text"], s["document"]) for s in segments if s["in_loss"]] == [
        (f"{number + 1}.\0", 0),
        ("many\0", 1),
    ]
    assert guarded(["data", "inspect", *RECIPE, *settings]) == 0
    printed = capsys.readouterr().out
    assert f"── chosen answer ──\n{number}+1=[[{number + 1}." in printed
    assert f"── rejected answer ──\n{number}+1=[[many" in printed


def test_an_answer_is_shown_with_that_of_another_record(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}.", "label": i > 9} for i in range(40)]
    (folder / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("data.path=rated.jsonl", "train.objective=kto", "data.seq_len=16")
    segments = inspect(capsys, *settings)["sample"]["segments"]
    number = int(segments[0]["text"].removesuffix("+1="))
    asked, own, again, other = ((s["text"], s["in_loss"], s["document"]) for s in segments)
    assert own == (f"{number + 1}.\0", True, 0)
    assert asked == (f"{number}+1=", False, 0)
    assert again == (f"{number}+1=", False, 1)
    assert other[1:] == (True, 1)
    assert other[0] != own[0]
    assert guarded(["data", "inspect", *RECIPE, *settings]) == 0
    printed = capsys.readouterr().out
    assert f"── answer ──\n{number}+1=[[{number + 1}." in printed
    assert f"── answer of another record ──\n{number}+1=[[" in printed


def test_answers_that_a_sample_has_no_room_for_are_not_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p" * random.randint(5, 90), "completion": "c" * 20} for _ in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("data.path=rows.jsonl", "data.seq_len=64", "data.validation_fraction=0")
    (part,) = inspect(capsys, *settings)["parts"]

    kept = [max(0, min(64 - len(row["prompt"]), 21)) for row in rows]  # 20, and the separator
    assert part["in_loss"] == sum(kept)
    assert part["without_targets"] == kept.count(0) > 0
    assert guarded(["data", "inspect", *RECIPE, *settings]) == 0
    assert f"{kept.count(0)} documents are cut before their first" in capsys.readouterr().out


def test_documents_of_a_sample_are_shown_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"document {i} é"}) for i in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    found = inspect(
        capsys,
        "data.path=rows.jsonl",
        "data.isolate=true",
        "data.packing=whole",
        "data.shuffle=false",
    )
    texts = [s["text"] for s in found["sample"]["segments"] if s["in_loss"]]
    assert all(text.endswith("\0") for text in texts)
    assert all("ocument" in text and "é" in text for text in texts)
    numbers = [s["document"] for s in found["sample"]["segments"]]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))


def test_a_mixture_is_shown_part_by_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(folder / "chat.jsonl")
    (folder / "text.txt").write_text("plain text " * 500)
    found = inspect(
        capsys,
        "data.mixture=[{path:chat.jsonl,weight:3},{path:text.txt}]",
        "data.chat_template=chatml",
    )
    kinds = [(part["format"], part["packing"], part["weight"]) for part in found["parts"]]
    assert kinds == [("jsonl", "none", 3.0), ("text", "stream", 1.0)]
    assert found["samples"]["train"] > found["parts"][0]["documents"]["train"]


def test_bad_records_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"text": f"row {i}" * random.randint(1, 9)}) for i in range(99)]
    rows[7] = "{"
    (folder / "rows.jsonl").write_text("\n".join(rows))
    found = inspect(capsys, "data.path=rows.jsonl", "data.on_bad=skip")
    assert found["parts"][0]["bad"]["count"] == 1
    assert "rows.jsonl:8: not JSON" in found["parts"][0]["bad"]["first"][0]

    assert guarded(["data", "inspect", *RECIPE, "data.path=rows.jsonl"]) == 2
    assert "rows.jsonl:8: expected a record that can be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sample", "99999"], "--sample=99999: expected a number from 0 to"),
        (["--split", "test"], "--split=test: expected one of train, validation"),
        (["data.isolate=1"], "data.isolate=1: expected true or false"),
        (["data.columns={body:x}"], "data.columns.body: expected one of text, prompt"),
        (["data.chat_template=none.jinja"], "expected chatml, or a file with a Jinja template"),
        (["data.workers=0"], "data.workers=0: expected 1 or more"),
        (["data.mixture=[{path:chat.jsonl}]"], "expected one source of data"),
        (["data.format=xml"], "data.format=xml: expected one of auto, text"),
        (
            ["data.path=null", "data.mixture=[{path:x}]"],
            "data.mixture[0].path=x: expected a folder",
        ),
        (
            ["data.path=null", "data.mixture=[{path:chat.jsonl,weight:0}]"],
            "data.mixture[0].weight=0.0: expected a number above 0",
        ),
        (
            ["data.path=null", "data.mixture=[{path:chat.jsonl}]", "data.tokenizer=bpe-300"],
            "data.tokenizer=bpe-300: expected one tokenizer for all parts",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    chat(folder / "chat.jsonl")
    start = ["data.path=chat.jsonl", "data.chat_template=chatml"]
    assert guarded(["data", "inspect", *RECIPE, *start, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_model_that_cannot_keep_documents_apart_is_told_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(folder / "chat.jsonl")
    (folder / "mine.py").write_text(
        "import torch\nclass M(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 2)\n"
        "    def forward(self, input_ids, labels): ...\n"
    )
    (folder / "recipes").mkdir()
    (folder / "recipes" / "mine.yaml").write_text(
        "model: {target: 'mine:M'}\n"
        "data: {path: chat.jsonl, isolate: true, chat_template: chatml}\n"
        "train: {global_batch: 8, micro_batch: 2}\n"
    )
    assert guarded(["plan", "recipe=mine"]) == 2
    assert "data.isolate=true: expected a model that takes document_ids" in capsys.readouterr().err


def test_data_cannot_steer_a_terminal() -> None:
    assert _visible("a\x1b[31m\nb\t\x07\x9b\x7f") == "a␛[31m\nb\t␇\ufffd␡"
