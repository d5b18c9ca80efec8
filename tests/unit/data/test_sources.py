"""Which files of a folder are trained on, which are validation, and which are said to be unread."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare import prepared as prepared_module
from colotrain.data.prepare.folders import split_in
from colotrain.data.prepare.sources import find_sources
from colotrain.data.prepare.tokens import notes_of, prepare, prepare_shards
from colotrain.errors import ConfigError
from colotrain.spec.plan import DataPlan
from tests.formats import write_dataset, write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def plan_of(*paths: Path | str, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": tuple(map(str, paths)),
        "seq_len": 16,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.25,
        "workers": 1,
    }
    return DataPlan(**{**settings, **changes})


def rows(folder: Path, **counts: int) -> None:
    """Files of records, whose texts are the names of their files and a number."""
    for name, count in counts.items():
        path = folder / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [{"text": f"{name} {i}"} for i in range(count)])


def splits_of(plan: DataPlan) -> dict[str, list[str]]:
    """Names of files in each split, with those that are left out and unread."""
    found = find_sources(plan)
    named = {"train": found.of("train"), "validation": found.of("validation")}
    named |= {"shared": found.of(None), "left out": found.left_out, "unread": found.unread}
    return {split: [file.name for file in files] for split, files in named.items() if files}


def documents_in(plan: DataPlan) -> dict[str, int]:
    prepared = prepare(plan)
    return {
        split: len(prepared.document_ends(split))  # type: ignore[arg-type]
        for split in ("train", "validation")
    }


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("training_data.json", "train"),
        ("train_sft", "train"),
        ("TrainSet.csv", "train"),
        ("TRAIN.JSONL", "train"),
        ("eval.jsonl", "validation"),
        ("my-data.eval.jsonl", "validation"),
        ("evaluation_1.json", "validation"),
        ("dev.tsv", "validation"),
        ("val2017.json", "validation"),
        ("valid.txt", "validation"),
        ("wiki.valid.tokens", "validation"),
        ("validation-0.arrow", "validation"),
        ("valset.csv", "validation"),
        ("holdout.jsonl", "validation"),
        ("hold_out.jsonl", "validation"),
        ("held-out.jsonl", "validation"),
        ("test.jsonl", "test"),
        ("test_sft", "test"),
        ("testset.csv", "test"),
        ("dev-test.jsonl", "test"),
        ("fineweb_val_000000.bin", "validation"),
        ("eval/part-0.jsonl", "validation"),
        ("test_sft/data-0.arrow", "test"),
        ("test-project/train.jsonl", "train"),
        ("train-test-split/part-0.jsonl", None),
        ("train_eval.jsonl", "unclear"),
        ("contest.jsonl", None),
        ("devices.jsonl", None),
        ("evaluate-me.jsonl", None),
        ("validated.tsv", None),
        ("trainers.jsonl", None),
        ("data-00000-of-00001.arrow", None),
    ],
)
def test_names_say_splits(name: str, split: str | None) -> None:
    assert split_in(name) == split


@pytest.mark.parametrize(
    ("files", "train", "validation"),
    [
        ({"train": 80, "eval": 20}, 80, 20),
        ({"train_sft": 80, "test_sft": 20}, 80, 20),
        ({"train": 70, "dev": 20, "test": 10}, 70, 20),
        ({"train__a": 40, "train__b": 40, "holdout__a": 20}, 80, 20),
        ({"chats": 80, "eval": 20}, 80, 20),
        ({"a": 40, "b": 40, "test": 20}, 80, 20),
        ({"train-0": 60, "train-1": 20, "my-evaluation": 20}, 80, 20),
    ],
)
def test_what_names_hold_back_is_not_trained_on(
    folder: Path, files: dict[str, int], train: int, validation: int
) -> None:
    rows(folder, **files)
    assert documents_in(plan_of(folder)) == {"train": train, "validation": validation}
    assert documents_in(plan_of(folder / "**" / "*.jsonl")) == documents_in(plan_of(folder))


@pytest.mark.parametrize("names", [("train_sft", "test_sft"), ("train", "eval"), ("en", "test")])
def test_splits_of_a_saved_dataset_are_named_like_files(
    folder: Path, names: tuple[str, str]
) -> None:
    for name, count in zip(names, (100, 20), strict=True):
        write_dataset(folder / name, [{"text": f"{name} {i}"} for i in range(count)])
    assert documents_in(plan_of(folder)) == {"train": 100, "validation": 20}  # saved one by one
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    assert documents_in(plan_of(folder)) == {"train": 100, "validation": 20}
    assert "unread" not in splits_of(plan_of(folder))


def test_text_is_split_by_name_and_source_code_is_not(folder: Path) -> None:
    for name in ("train.txt", "valid.txt", "test.txt", "README.md"):
        (folder / name).write_text(name)
    assert splits_of(plan_of(folder)) == {
        "train": ["train.txt"],
        "validation": ["valid.txt"],
        "left out": ["test.txt"],
        "unread": ["README.md"],
    }
    prepared = prepare(plan_of(folder))
    assert bytes(prepared.tokens("train").astype(np.uint8)) == b"train.txt"
    assert bytes(prepared.tokens("validation").astype(np.uint8)) == b"valid.txt"
    (folder / "prepare.py").write_text("1")
    with pytest.raises(ConfigError, match=r"prepare\.py: expected a name that says train"):
        find_sources(plan_of(folder))

    code = folder / "code"
    for name in (
        "train.py",
        "eval.py",
        "tests/test_a.py",
        "docs/testing.md",
        "requirements-dev.txt",
    ):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    assert list(splits_of(plan_of(code))) == ["shared"]


def test_files_named_in_a_list_say_splits_as_files_of_a_folder_do(tmp_path: Path) -> None:
    for home in ("train", "eval"):
        rows(tmp_path / home, part=10)
    places = [tmp_path / "train", tmp_path / "eval"]
    for paths in (places, [place / "part.jsonl" for place in places]):
        assert documents_in(plan_of(*paths)) == {"train": 10, "validation": 10}
    assert list(splits_of(plan_of(tmp_path / "eval"))) == ["shared"]


def test_held_back_data_alone_are_trained_on_only_where_a_file_is_named(folder: Path) -> None:
    rows(folder, test=20, validation=20)
    for path in (folder, folder / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"expected data to train on .*data\.path=.*jsonl"):
            find_sources(plan_of(path))
    plan = plan_of(folder / "test.jsonl")
    assert list(splits_of(plan)) == ["shared"]
    (note,) = notes_of(plan, [])
    assert "test.jsonl: trained on although the name says test" in str(note)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("extra", r"extra\.jsonl: expected a name that says train, .*train-extra\.jsonl"),
        ("train-eval", r"train-eval\.jsonl: expected a name that says one split"),
    ],
)
def test_a_file_that_may_be_in_any_split_is_refused(folder: Path, name: str, told: str) -> None:
    rows(folder, train=5, valid=5, **{name: 5})
    (folder / "dataset_infos.json").write_text("{}")
    with pytest.raises(ConfigError, match=told):
        prepare(plan_of(folder))


STRAYS = {
    "loader.py": b"import json",
    "picture.png": b"\x89PNG\0\0",
    "NOTICE": b"about",
    "stats.json": b'{"rows": 80}\n',
    "pretty.json": b'{\n "rows": 80\n}\n',
    "dataset_infos.json": b'{"default": {}}',
    "README.md": b"about",
    "LICENSE.txt": b"about",
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "json", "bin"])
@pytest.mark.parametrize("stray", [*STRAYS, "all"])
def test_a_stray_file_changes_nothing_and_is_said(folder: Path, kind: str, stray: str) -> None:
    texts = [f"record {i}" for i in range(80)]
    if kind == "jsonl":
        write_jsonl(folder / "train-0.jsonl", [{"text": text} for text in texts])
    elif kind == "json":
        (folder / "train-0.json").write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "csv":
        (folder / "train-0.csv").write_text("\n".join(["text", *texts]))
    elif kind == "bin":
        np.arange(200, dtype=np.uint16).tofile(folder / "train-0.bin")
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(__import__("pyarrow").table({"text": texts}), folder / "train-0.parquet")
    clean = prepare(plan_of(folder))
    names = sorted(STRAYS) if stray == "all" else [stray]
    for name in names:
        (folder / name).write_bytes(STRAYS[name])
    (folder / ".gitattributes").write_text("hidden")

    plan = plan_of(folder)
    assert splits_of(plan)["unread"] == names
    found = prepare(plan)
    assert (found.num_train, found.num_validation) == (clean.num_train, clean.num_validation)
    (note,) = notes_of(plan, [found])
    assert re.match(rf"{len(names)} files? (is|are) not read: {names[0]}", str(note))


@pytest.mark.parametrize(
    "names", [["notes.txt"], [f"{i}.py" for i in range(9)], ["rows.parquet"], ["weights.bin"]]
)
def test_a_folder_that_may_mean_two_things_is_refused(folder: Path, names: list[str]) -> None:
    rows(folder, rows=5)
    for name in names:
        (folder / name).write_text("content")
    with pytest.raises(ConfigError, match=r"expected one format, not .*; set data\.format"):
        find_sources(plan_of(folder))
    assert splits_of(plan_of(folder, format="jsonl")) == {"shared": ["rows.jsonl"], "unread": names}


def test_a_folder_of_text_is_text_whatever_its_endings(folder: Path) -> None:
    names = ["LICENSE", "README.md", "a.py", "b.txt", "package.json", "setup.cfg"]
    for name in names:
        (folder / name).write_text("{}" if name.endswith(".json") else name)
    (folder / "picture.png").write_bytes(b"\0")
    (folder / "weights.bin").write_bytes(b"1234")
    plan = plan_of(folder, validation_fraction=0.0)
    assert splits_of(plan)["unread"] == ["weights.bin"]
    prepared = prepare(plan)
    assert documents_in(plan) == documents_in(
        plan_of(folder, format="text", validation_fraction=0.0)
    )
    assert sum(documents_in(plan).values()) == len(names)
    assert [str(note) for note in notes_of(plan, [prepared])] == [
        "1 file is not read: weights.bin",
        "not read, because no text: picture.png",
    ]


def test_formats_may_differ_between_splits_but_not_within_one(folder: Path) -> None:
    rows(folder, train=20)
    (folder / "eval.csv").write_text("text\n" + "\n".join("abcde"))
    assert documents_in(plan_of(folder)) == {"train": 20, "validation": 5}
    (folder / "train.csv").write_text("text\nagain")
    with pytest.raises(ConfigError, match="one format, not csv and jsonl"):
        find_sources(plan_of(folder))


def test_token_files_are_split_by_the_same_names(folder: Path) -> None:
    for name in ("fineweb_val_000000", "fineweb_train_000001", "fineweb_train_000002"):
        np.arange(40, dtype=np.uint16).tofile(folder / f"{name}.bin")
    (folder / "cached_fineweb.py").write_text("1")
    shards = prepare_shards(plan_of(folder))
    assert [(s.train.stem, s.num_train, s.num_validation) for s in shards] == [
        ("fineweb_train_000001", 40, 0),
        ("fineweb_train_000002", 40, 0),
        ("fineweb_val_000000", 0, 40),
    ]


def validated(*paths: Path, by: Path | tuple[Path, ...], **changes: Any) -> DataPlan:
    held = by if isinstance(by, tuple) else (by,)
    return plan_of(*paths, validation_paths=tuple(map(str, held)), **changes)


def test_validation_data_of_ones_own_are_all_of_it(folder: Path, tmp_path: Path) -> None:
    rows(folder, a=50, b=30)
    rows(tmp_path / "held", gold=20)
    for held in (tmp_path / "held", tmp_path / "held" / "gold.jsonl", tmp_path / "h*" / "*"):
        plan = validated(folder, by=held)
        assert documents_in(plan) == {"train": 80, "validation": 20}
    rows(folder, eval=9, test=9)  # held back, and validation is what the key says
    assert splits_of(plan) == {
        "train": ["a.jsonl", "b.jsonl"],
        "validation": ["held/gold.jsonl"],
        "left out": ["eval.jsonl", "test.jsonl"],
    }
    rows(tmp_path / "held", eval=5, train=5)
    assert splits_of(validated(folder, by=tmp_path / "held"))["validation"] == ["eval.jsonl"]


def test_validation_data_may_have_another_format_but_are_of_the_same_kind(
    folder: Path, tmp_path: Path
) -> None:
    rows(folder, a=50)
    (tmp_path / "gold.json").write_text(json.dumps([{"text": "x"}] * 7))
    assert documents_in(validated(folder, by=tmp_path / "gold.json"))["validation"] == 7
    (tmp_path / "gold.txt").write_text("x")
    told = r"data\.validation_path=.*gold\.txt: expected records, as data\.path has, not text"
    with pytest.raises(ConfigError, match=told):
        find_sources(validated(folder, by=tmp_path / "gold.txt"))
    (tmp_path / "book.txt").write_text("book")
    prepared = prepare(validated(tmp_path / "book.txt", by=tmp_path / "gold.txt"))
    assert (prepared.num_train, prepared.num_validation) == (4, 1)
    for name, count in (("a", 40), ("b", 9)):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (shard,) = prepare_shards(validated(tmp_path / "a.bin", by=tmp_path / "b.bin"))
    assert (shard.num_train, shard.num_validation) == (40, 9)
    library = validated(by=tmp_path / "gold.txt", source="corpus", corpus="stdlib")
    assert [file.name for file in find_sources(library).of("validation")] == ["gold.txt"]


def test_files_in_both_keys_are_not_trained_on(folder: Path) -> None:
    rows(folder, a=50, gold=20)
    (folder / "link.jsonl").symlink_to(folder / "gold.jsonl")
    plan = validated(folder, by=folder / "gold.jsonl")
    assert documents_in(plan) == {"train": 50, "validation": 20}
    (note,) = notes_of(plan, [])
    assert str(note) == "gold.jsonl, link.jsonl: in data.validation_path, and so not trained on"
    for both in (folder / "a.jsonl", folder / ".." / "data" / "a.jsonl"):
        told = r"data\.validation_path=.*expected other files than those of data\.path"
        with pytest.raises(ConfigError, match=told):
            find_sources(validated(folder / "a.jsonl", by=both))


@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_documents_of_both_splits_are_counted(
    folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "HASHED_DOCUMENTS", 7)
    monkeypatch.setattr(prepared_module, "MOST_HASHED", random.choice([3, 6, 100]))
    texts = [f"document {i}" for i in range(60)]
    held = [*random.sample(texts, 9), *(f"another {i}" for i in range(11))]
    random.shuffle(held)
    if ending == "jsonl":
        write_jsonl(folder / "train.jsonl", [{"text": text} for text in texts])
        write_jsonl(folder / "eval.jsonl", [{"text": text} for text in held])
    else:
        for split, documents in (("train", texts), ("eval", held)):
            for i, text in enumerate(documents):
                (folder / f"{split}-{i}.txt").write_text(text)
    notes = notes_of(plan_of(folder), [prepare(plan_of(folder))])
    assert [str(n) for n in notes] == ["9 of 20 validation documents are trained on, too"]
