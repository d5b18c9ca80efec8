"""Words with a class each: how they are read from files, split into tokens, and cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from colotrain.data.prepare.classes import class_number, find_classes
from colotrain.data.prepare.conversations import Renderer
from colotrain.data.prepare.records import BadRecord
from colotrain.data.read.inspection import describe, sample_tokens
from colotrain.data.read.loader import open_samples
from colotrain.errors import ConfigError
from colotrain.spec.plan import DataPlan

CLASSES = ("O", "B-X", "I-X")
RECORD = {"tokens": ["ab", "c", "abc"], "ner_tags": ["B-X", "I-X", "O"]}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words").mkdir()
    vocabulary = {text: number for number, text in enumerate(["[CLS]", "[SEP]", "[UNK]", *"abc"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary | {"##b": 6, "##c": 7}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", 0), ("[SEP]", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, marks)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "words"


def plan_of(folder: Path, **more: Any) -> DataPlan:
    settings = {"source": "path", "paths": (str(folder),), "seq_len": 8, "shuffle": False}
    settings |= {"tokenizer": str(folder.parent / "tokenizer.json"), "classes_of_words": True}
    return DataPlan(**settings | more)


def write(folder: Path, *records: dict[str, Any], split: str = "train") -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / f"{split}.jsonl").write_text("".join(lines))


def rows(plan: DataPlan, folder: Path) -> list[dict[str, list[int]]]:
    samples = open_samples(plan, "train", cache=folder / "cache")
    return [{n: t.tolist() for n, t in samples[i].items()} for i in range(len(samples))]


def test_the_first_token_of_a_word_has_its_class_and_a_cut_text_its_end(words: Path) -> None:
    long = {"tokens": ["a"] * 9, "ner_tags": ["I-X"] * 9}
    write(words, RECORD, long, {"tokens": ["a", "b"], "ner_tags": [-100, "O"]})
    write(words, RECORD, split="validation")
    first, second, third = rows(plan_of(words, classes=CLASSES), words.parent)
    assert first["input_ids"] == [0, 3, 6, 5, 3, 6, 7, 1]
    assert first["labels"] == [-100, 1, -100, 2, 0, -100, -100, -100]
    assert second["input_ids"] == [0, *[3] * 6, 1]
    assert second["labels"] == [-100, *[2] * 6, -100]
    assert third["padding_mask"] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert third["labels"] == [-100, -100, 0, *[-100] * 5]
    turned = rows(plan_of(words, classes=CLASSES[::-1]), words.parent)
    assert turned[0]["labels"] == [-100, 1, -100, 0, 2, -100, -100, -100]


def test_more_classes_than_a_byte_holds_are_told_apart(words: Path) -> None:
    classes = tuple(map(str, range(300)))
    write(words, {"tokens": ["a", "b"], "labels": [299, 256]})
    write(words, RECORD | {"ner_tags": [1, 2, 3]}, split="validation")
    (row,) = rows(plan_of(words, classes=classes), words.parent)
    assert row["labels"][1:3] == [299, 256]


def test_files_of_conll_have_a_word_and_its_class_on_a_line(words: Path) -> None:
    text = "-DOCSTART- -X- O\n\nab NN B-X\nc  NN I-X\n\n\nabc\tNN\tO\n\u00a0a\tNN\tO"
    (words / "train.conll").write_text(text + "\n", newline="")
    (words / "validation.conll").write_text("a NN O\r\n", newline="")
    plan = plan_of(words, classes=CLASSES)
    assert find_classes([plan]) == ("B-X", "I-X", "O")
    first, second = rows(plan, words.parent)
    assert first["labels"][:5] == [-100, 1, -100, 2, -100]
    assert second["labels"][:5] == [-100, 0, -100, -100, 0]
    (words / "train.conll").write_text("ab NN B-X\nc\n")
    with pytest.raises(ConfigError, match=r"train\.conll:2: expected 3 fields as above, not 1"):
        rows(plan, words.parent)
    universal = "1\tab\tab\tNOUN\tNN\t_\t0\troot\t_\t_\n"
    for head, line in (("", 1), ("# text = ab\n", 1), ("a NN O\n\n", 3)):
        (words / "train.conll").write_text(head + universal)
        with pytest.raises(ConfigError, match=rf"train\.conll:{line}: .*not CoNLL-U"):
            rows(plan, words.parent)
    (words / "train.conll").write_text("# NN O\n")
    with pytest.raises(ConfigError, match=r"train\.conll:1: .*without comments"):
        rows(plan, words.parent)


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_numbers_of_the_datasets_library_have_its_names(words: Path, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    feature = {"names": [*CLASSES, "B-Y"], "_type": "ClassLabel"}
    features = {"ner_tags": {"feature": feature, "_type": "List"}, "label": feature}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {"tokens": [["ab", "c"]], "ner_tags": [[2, -100]], "label": [1], "text": ["a"]}
    table = pa.table(columns).replace_schema_metadata(metadata)
    if name.endswith("parquet"):
        pq.write_table(table, words / name)
    else:
        with pa.OSFile(str(words / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as w:
            w.write_table(table)
    plan = plan_of(words, validation_fraction=0.0)
    assert find_classes([plan]) == (*CLASSES, "B-Y")
    (row,) = rows(plan_of(words, classes=("I-X", "O"), validation_fraction=0.0), words.parent)
    assert row["labels"][:4] == [-100, 0, -100, -100]
    texts = plan_of(words, classes_of_words=False, validation_fraction=0.0)
    assert find_classes([texts]) == (*CLASSES, "B-Y")
    (sample,) = rows(
        plan_of(words, classes=("I-X", "B-X"), classes_of_words=False, validation_fraction=0.0),
        words.parent,
    )
    assert sample["labels"] == 1


def listed(folder: Path, feature: str, names: tuple[str, ...], **columns: list[Any]) -> None:
    """Write a Parquet file whose column `feature` has numbers of these classes."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    features = {feature: {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), folder / "train.parquet")


def test_a_number_outside_a_files_classes_is_a_bad_record(words: Path) -> None:
    texts = {"text": ["a", "b", "c"], "label": [1, -1, 0]}
    listed(words, "label", ("yes", "maybe", "no"), **texts)
    settings: dict[str, Any] = {"classes_of_words": False, "validation_fraction": 0.0}
    assert find_classes([plan_of(words, **settings)]) == ("yes", "maybe", "no")
    settings["classes"] = ("yes", "maybe", "no")
    with pytest.raises(ConfigError, match=r":2: .*label: -1 is none of the file's 3 classes"):
        rows(plan_of(words, **settings), words.parent)
    found = rows(plan_of(words, on_bad="skip", **settings), words.parent)
    assert [row["labels"] for row in found] == [1, 0]


def test_other_objectives_have_the_numbers_of_a_files_classes(words: Path) -> None:
    answers = {"prompt": ["a", "b"], "completion": ["b", "c"], "label": [1, 0]}
    listed(words, "label", ("bad", "good"), **answers)
    settings: dict[str, Any] = {"classes_of_words": False, "rated": True}
    (part,) = describe(plan_of(words, validation_fraction=0.0, **settings))["parts"]
    assert part["documents"]["train"] == 2


def test_numbers_are_those_of_named_classes() -> None:
    labels = ("I-X", 2, "1", 3, -1, True)
    assert [class_number(value, CLASSES, numbered=True) for value in labels] == [
        2,
        2,
        1,
        None,
        None,
        None,
    ]
    assert class_number(1, ("2", "1", "0"), numbered=False) == 1
    assert class_number(0, ("2", "1"), numbered=True) is None
    assert [class_number(value, CLASSES, numbered=False) for value in ("I-X", 2, "1")] == [
        2,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (RECORD | {"ner_tags": ["O"]}, "ner_tags: expected a label for each of 3 words, not 1"),
        ({"tokens": ["a"]}, "labels: expected a label for each of 1 words, not none"),
        (RECORD | {"ner_tags": "O"}, "ner_tags: not JSON"),
        (RECORD | {"ner_tags": {"a": 1}}, "ner_tags: expected a list with a label for each word"),
        (
            RECORD | {"ner_tags": ["O", "B-Y", "O"]},
            "ner_tags: expected one of O, B-X, I-X, not B-Y",
        ),
        (RECORD | {"ner_tags": ["O", None, "O"]}, "not nothing"),
        ({"text": "ab c", "label": "O"}, "tokens: expected a list of words, as texts; the record"),
        (RECORD | {"tokens": ["ab", 3, "c"]}, "tokens: expected a list of words, as texts"),
    ],
)
def test_what_is_no_text_of_words_is_said(record: dict[str, Any], why: str) -> None:
    renderer = Renderer(
        columns={}, loss_on="answers", template=None, classes=CLASSES, classes_of_words=True
    )
    with pytest.raises(BadRecord, match=why):
        renderer.documents(record)
    empty: dict[str, Any] = {"tokens": [], "ner_tags": []}
    assert renderer.documents(empty) == []


def test_columns_have_other_names_and_the_inspection_shows_classes(words: Path) -> None:
    write(words, {"text": ["ab", "c"], "pos": ["B-X", "I-X"], "ner_tags": ["O", "O"]})
    write(words, {"text": ["a"], "pos": ["O"]}, split="validation")
    columns = {"tokens": "text", "labels": "pos"}
    plan = plan_of(words, classes=CLASSES, columns=columns)
    (part,) = describe(plan)["parts"]
    assert (part["in_loss"], part["lengths"]["max"], part["tokens"]["train"]) == (2, 5, 5)
    _, tokens = sample_tokens(plan, 0, seed=0)
    assert [token.text.strip() for token in tokens if token.in_loss] == ["a→B-X", "c→I-X"]


def test_a_tokenizer_that_joins_words_is_told(words: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    for adds_space in (False, True):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
        tokenizer.save(str(words.parent / "tokenizer.json"))
        write(words, RECORD)
        write(words, RECORD, split="validation")
        (part,) = describe(plan_of(words, classes=CLASSES))["parts"]
        told = any("no space between words" in note["text"] for note in part["notes"])
        assert told is not adds_space
