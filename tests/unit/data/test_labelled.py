"""Texts with a class: how they are read from files, and what becomes of long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from colotrain.data.prepare.classes import class_name, find_classes, in_order
from colotrain.data.prepare.conversations import Renderer
from colotrain.data.prepare.records import BadRecord
from colotrain.data.read.inspection import describe, sample_tokens
from colotrain.data.read.loader import open_samples
from colotrain.errors import ConfigError
from colotrain.spec.plan import DataPlan

CLASSES = ("bad", "good")


def plan_of(folder: Path, tokenizer: str = "bytes", **more: object) -> DataPlan:
    settings = {"source": "path", "paths": (str(folder),), "tokenizer": tokenizer, "seq_len": 8}
    return DataPlan(**settings | more)  # type: ignore[arg-type]


def write(folder: Path, split: str, *rows: tuple[str, object]) -> None:
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
    (folder / f"{split}.jsonl").write_text("".join(lines))


def test_classes_are_the_training_records_in_an_order_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "train", ("a", "10"), ("b", 2), ("c", 10), ("d", True))
    write(tmp_path, "validation", ("e", "other"))
    assert find_classes([plan_of(tmp_path)]) == ("10", "2", "true")
    write(tmp_path, "train", ("a", "10"), ("bb", 2), ("c", 10), ("d", 2.0))
    assert find_classes([plan_of(tmp_path)]) == ("2", "10")
    assert in_order({"b", "a", "10"}) == ("10", "a", "b")
    assert [class_name(value) for value in (False, 0.5, None, " x ", "")] == [
        "false",
        None,
        None,
        "x",
        None,
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text.txt").write_text("once")
    with pytest.raises(ConfigError, match="records with a text and a label, not text"):
        find_classes([plan_of(tmp_path / "other")])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"text": "a", "label": "ugly"}, "label: expected one of bad, good, not ugly"),
        ({"text": "a", "label": "1"}, r"not 1 \(numbers stand .* of train.classify.classes, in"),
        ({"text": "a"}, "label: expected one of bad, good, not nothing$"),
        ({"label": "bad"}, "text: expected a text, and there is none"),
        ({"text": 3, "label": "bad"}, "text: expected text, not "),
    ],
)
def test_what_is_no_labelled_text_is_said(record: dict, why: str) -> None:
    renderer = Renderer(columns={}, loss_on="answers", template=None, classes=CLASSES)
    with pytest.raises(BadRecord, match=why):
        renderer.documents(record)


def test_a_text_has_its_class_and_ends_where_its_mask_does(tmp_path: Path) -> None:
    folder, cache = tmp_path / "texts", tmp_path / "cache"
    folder.mkdir()
    write(folder, "train", ("abc", "good"), ("much too long", "bad"))
    write(folder, "validation", ("x", "good"))
    plan = plan_of(folder, classes=CLASSES)
    samples = open_samples(plan, "train", cache=cache)
    assert len(samples) == 2
    assert samples[0]["input_ids"].tolist() == [97, 98, 99, 0, 0, 0, 0, 0]
    assert samples[0]["padding_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [samples[number]["labels"].item() for number in (0, 1)] == [1, 0]
    assert bytes(samples[1]["input_ids"].tolist()) == b"much too"
    assert open_samples(plan, "validation", cache=cache)[0]["labels"].item() == 1
    turned = plan_of(folder, classes=("good", "bad"))
    assert open_samples(turned, "train", cache=cache)[0]["labels"].item() == 0
    write(folder, "validation", ("x", "ugly"))
    with pytest.raises(ConfigError, match="expected one of bad, good, not ugly"):
        open_samples(plan, "validation", cache=cache)


def test_a_text_has_what_the_tokenizer_puts_around_it_also_where_it_is_cut(tmp_path: Path) -> None:
    vocabulary = {text: number for number, text in enumerate(["[CLS]", "[SEP]", "[UNK]", *"abc"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", 0), ("[SEP]", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, marks)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", "train", ("a b", "good"), ("a b c a b c a b c", "bad"))
    write(tmp_path / "texts", "validation", ("c", "bad"))
    plan = plan_of(tmp_path / "texts", str(tmp_path / "tokenizer.json"), classes=CLASSES)
    samples = open_samples(plan, "train", cache=tmp_path / "cache")
    assert samples[0]["input_ids"].tolist() == [0, 3, 4, 1, 0, 0, 0, 0]
    assert samples[0]["padding_mask"].sum() == 4
    assert samples[1]["input_ids"].tolist() == [0, 3, 4, 5, 3, 4, 5, 1]


def test_the_inspection_shows_a_text_and_its_class(tmp_path: Path) -> None:
    write(tmp_path, "train", ("abc", "good"), ("much too long", "bad"))
    write(tmp_path, "validation", ("x", "good"))
    plan = plan_of(tmp_path, classes=CLASSES, shuffle=False)
    (part,) = describe(plan)["parts"]
    assert (part["in_loss"], part["lengths"]["max"], part["texts"]["ends"]) == (2, 13, ())
    _, tokens = sample_tokens(plan, 0, seed=0)
    assert "".join(token.text for token in tokens) == "abc → good"


def test_lines_of_fasttext_have_their_class_before_the_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    train = tmp_path / "texts" / "train.txt"
    train.write_text("__label__good abc\n\n__label__bad\tx  y \n", newline="")
    (tmp_path / "texts" / "validation.txt").write_text("__label__bad z")
    (tmp_path / "texts" / "README.md").write_text("what it is")
    plan = plan_of(tmp_path / "texts", format="fasttext")
    assert find_classes([plan]) == CLASSES
    plan = plan_of(tmp_path / "texts", format="fasttext", classes=CLASSES)
    samples = open_samples(plan, "train", cache=tmp_path / "cache")
    found = [
        bytes(row["input_ids"][row["padding_mask"] > 0].tolist()) for row in samples_of(samples)
    ]
    assert found == [b"abc", b"x  y"]
    assert [row["labels"].item() for row in samples_of(samples)] == [1, 0]
    for line, why in (
        ("__label__good __label__bad both", "label: expected one of bad, good, not "),
        ("neither", "label: expected one of bad, good, not nothing"),
        ("__label__good", "text: expected a text, and there is none"),
        ("__label__good once __label__bad", "__label__bad is within the text: classes stand befo"),
        ("once\t__label__bad", "__label__bad is within the text"),
    ):
        train.write_text(f"__label__good a\n{line}\n")
        with pytest.raises(ConfigError, match=rf"train\.txt:2: .*{why}"):
            open_samples(plan, "train", cache=tmp_path / "cache")


def samples_of(samples: Any) -> list[dict[str, Any]]:
    return [samples[number] for number in range(len(samples))]
