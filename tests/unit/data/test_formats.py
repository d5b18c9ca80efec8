"""Every format of data on disk: recognised, read back whole, and prepared the same wherever cut."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from colotrain.data.prepare import records, token_files, tokenising
from colotrain.data.prepare.formats import FORMATS
from colotrain.data.prepare.prepared import Prepared
from colotrain.data.prepare.sources import find_sources
from colotrain.data.prepare.tokens import decode, prepare, prepare_shards
from colotrain.data.read.loader import BatchLoader, open_samples, order_of
from colotrain.errors import ColotrainError, ConfigError
from colotrain.spec.plan import BatchPlan, DataPlan
from colotrain.spec.settings import DataFormat
from tests.formats import (
    WRITERS,
    random_texts,
    write_dataset,
    write_jsonl,
    write_megatron,
    write_parquet,
)

pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def test_every_format_that_a_configuration_may_name_has_a_reader() -> None:
    assert get_args(DataFormat) == ("auto", *FORMATS)
    assert {"text", *records.READERS, *token_files.OPENERS} == FORMATS.keys()


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


def documents_of(prepared: Prepared, split: str) -> list[list[int]]:
    tokens, ends = prepared.tokens(split), prepared.document_ends(split)  # type: ignore[arg-type]
    assert ends is not None
    return [part.tolist() for part in np.split(np.asarray(tokens), ends)[:-1]]


def texts_of(prepared: Prepared) -> list[str]:
    """Every document of both splits without its separator."""
    found = [ids for split in ("train", "validation") for ids in documents_of(prepared, split)]
    assert all(ids[-1] == 0 for ids in found)
    return [decode("bytes", ids[:-1]) for ids in found]


@pytest.mark.parametrize("kind", WRITERS)
def test_records_come_back_whole_and_each_in_one_split(tmp_path: Path, kind: str) -> None:
    texts = random_texts(60)
    path = WRITERS[kind](tmp_path, [{"text": text, "id": i} for i, text in enumerate(texts)])
    plan = plan_of(path)

    assert find_sources(plan).kinds == kind
    prepared = prepare(plan)
    assert sorted(texts_of(prepared)) == sorted(texts)
    assert 0 < prepared.num_validation < prepared.num_train
    assert prepared.num_bytes_train + prepared.num_bytes_validation == sum(  # type: ignore[operator]
        len(text.encode()) for text in texts
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_blocks_and_processes_change_no_byte(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": a, "completion": b} for a, b in zip(*[random_texts(50)] * 2, strict=True)]
    path = WRITERS[kind](tmp_path, rows)
    whole = prepare(plan_of(path), cache=tmp_path / "a")
    monkeypatch.setattr(records, "BLOCK_BYTES", 200)
    monkeypatch.setattr(records, "BLOCK_ROWS", 3)
    cut = prepare(plan_of(path, workers=2), cache=tmp_path / "b")

    for name in ("train.bin", "train.ends", "train.targets", "validation.bin", "prepared.json"):
        assert (whole.train.parent / name).read_bytes() == (cut.train.parent / name).read_bytes()


def test_gzipped_lines_are_read(tmp_path: Path) -> None:
    texts = random_texts(20)
    plain = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(plain))
    assert sorted(texts_of(prepare(plan_of(path)))) == sorted(texts)

    damaged = bytearray(gzip.compress(plain))
    damaged[10] = 0xFF  # a block of no type that there is
    for broken in (gzip.compress(plain)[:-20], bytes(damaged)):
        path.write_bytes(broken)
        with pytest.raises(ColotrainError, match="not a whole gzip file"):
            prepare(plan_of(path))


def test_many_shards_are_one_corpus_in_the_order_of_their_names(tmp_path: Path) -> None:
    texts = random_texts(40)
    for i in range(8):
        write_jsonl(tmp_path / f"{i:02}.jsonl", [{"text": t} for t in texts[i * 5 : i * 5 + 5]])
    prepared = prepare(plan_of(tmp_path, validation_fraction=0.0))
    assert texts_of(prepared) == texts


def test_splits_that_are_named_are_kept(tmp_path: Path) -> None:
    rows = [{"text": text} for text in random_texts(30)]
    for split, part in (("train", rows[:20]), ("validation", rows[20:24]), ("test", rows[24:])):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", part)
    prepared = prepare(plan_of(tmp_path))
    assert len(documents_of(prepared, "train")) == 20
    assert len(documents_of(prepared, "validation")) == 4

    for split, part in (("train", rows[:20]), ("test", rows[20:])):
        write_dataset(tmp_path / "dict" / split, part)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    prepared = prepare(plan_of(tmp_path / "dict"))
    assert len(documents_of(prepared, "train")) == 20
    assert len(documents_of(prepared, "validation")) == 10


def test_other_splits_of_a_saved_dataset_are_left_out(tmp_path: Path) -> None:
    splits = ["train", "test", "unsupervised"]
    for split in splits:
        write_dataset(tmp_path / "dict" / split, [{"text": split}])
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    files = find_sources(plan_of(tmp_path / "dict")).files
    assert {(file.path.parent.name, file.split) for file in files} == {
        ("train", "train"),
        ("test", "validation"),
    }


@pytest.mark.parametrize("home", ["data", ".mydata"])
def test_hidden_folders_below_have_no_say_and_one_above_hides_nothing(
    tmp_path: Path, home: str
) -> None:
    folder = tmp_path / home
    for aside in (".cache/huggingface/download/rows.jsonl.metadata", ".git/objects/ab/cdef"):
        (folder / aside).parent.mkdir(parents=True)
        (folder / aside).write_text("no data")
    write_jsonl(folder / "rows.jsonl", [{"text": "a"}])
    assert find_sources(plan_of(folder)).kinds == "jsonl"
    assert [file.name for file in find_sources(plan_of(folder)).files] == ["rows.jsonl"]


BAD = [
    (b"{", "not JSON"),
    (b"[1]", "expected a JSON object, not list"),
    (b'{"body": "x"}', "expected text, or prompt and completion, or messages; it has body"),
    (b'{"text": null}', "text: expected text, not null"),
    (b'{"text": 3}', "text: expected text, not int"),
    (b'{"text": "\\ud800"}', "not valid Unicode"),
    (b'\xff{"text": "a"}', "not UTF-8"),
    ('{"text": "a"}'.encode("utf-16"), "UTF-16: convert the file to UTF-8"),
    (b'{"messages": []}', "messages: expected a list with messages in it, not an empty list"),
    (b'{"prompt": "a"}', "completion: expected text, not null"),
    (b'{"prompt": "a", "completion": ""}', "completion: it is empty"),
    (b'{"messages": []}', "messages: expected a list"),
    (b'{"messages": [{"role": "user"}]}', "message 1: expected text as content"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant"),
]


@pytest.mark.parametrize(("line", "told"), BAD)
def test_a_bad_record_is_named_with_file_and_line(tmp_path: Path, line: bytes, told: str) -> None:
    good = [json.dumps({"text": text}).encode() for text in random_texts(30)]
    at = random.randrange(30)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*good[:at], line, *good[at:]]))
    plan = plan_of(path, chat_template="chatml")

    with pytest.raises(ConfigError) as caught:
        prepare(plan)
    assert f"{path}:{at + 1}: expected a record that can be used ({told}" in str(caught.value)
    assert "data.on_bad=skip" in str(caught.value)


def test_bad_records_are_counted_and_left_out_when_that_is_wanted(tmp_path: Path) -> None:
    texts = random_texts(40)
    lines = [json.dumps({"text": text}).encode() for text in texts]
    for line, _ in BAD:
        lines.insert(random.randrange(len(lines)), line)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    plan = plan_of(tmp_path / "rows.jsonl", on_bad="skip", chat_template="chatml")

    prepared = prepare(plan)
    assert sorted(texts_of(prepared)) == sorted(texts)
    assert prepared.num_bad == len(BAD)
    assert len(prepared.bad) == tokenising.BAD_SHOWN
    assert prepare(plan).num_bad == len(BAD)  # what the cache gives says the same
    with pytest.raises(ConfigError):
        prepare(plan_of(tmp_path / "rows.jsonl", chat_template="chatml"))


def test_a_bad_record_stops_work_in_other_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 100)
    lines = [json.dumps({"text": text}) for text in random_texts(50)]
    lines[33] = "nothing"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:34: .*not JSON"):
        prepare(plan_of(tmp_path / "rows.jsonl", workers=2))


def die(_: int) -> int:
    import os

    os._exit(3)


def nothing() -> None: ...


def test_a_process_that_dies_is_an_error_with_a_way_out() -> None:
    found = tokenising.in_order(die, range(9), workers=2, begin=nothing, args=())
    with pytest.raises(ColotrainError, match=r"data\.workers=1"):
        list(found)


def test_a_script_without_a_guard_and_without_a_file_may_prepare_data(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in random_texts(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    plan = plan_of(tmp_path / "rows.jsonl", workers=2)
    code = (
        "from colotrain.data.prepare import records\n"
        "from colotrain.data.prepare.tokens import prepare\n"
        "from colotrain.spec.plan import BatchPlan, DataPlan\n"
        f"records.BLOCK_BYTES = 100\nprint(prepare({plan!r}).num_train > 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable], input=code, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("kind", [*WRITERS, "text", "nanogpt", "megatron"])
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_in_the_middle_of_any_format_the_next_batch_is_found_anew(
    tmp_path: Path, kind: str, packing: str
) -> None:
    """What a resumed run does: a fresh look at the data gives the batches that were to come."""
    texts, rng = random_texts(80), np.random.default_rng()
    if kind in WRITERS:
        path = WRITERS[kind](tmp_path, [{"text": text} for text in texts])
    elif kind == "text":
        path = tmp_path / "text"
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f"{i}.txt").write_text(text)
    elif kind == "megatron":
        path = write_megatron(tmp_path / "a", [rng.integers(0, 99, 20) for _ in texts], 8, "<u2")
    else:
        if packing == "whole":
            pytest.skip("its documents are not known")
        path = tmp_path / "a.bin"
        rng.integers(0, 99, 3000).astype(np.uint16).tofile(path)
    plan = plan_of(path, packing=packing, isolate=packing == "whole")

    def batches(world_size: int, steps: range) -> list[list[list[int]]]:
        """The sequences of each step, over all ranks in the order of the positions."""
        samples = open_samples(plan, "train")
        order = order_of(samples, seed=5, shuffle=True)
        batch = BatchPlan(
            global_batch=8,
            micro_batch=2,
            accumulation_steps=4 // world_size,
            data_parallel=world_size,
        )
        ranks = [BatchLoader(samples, order, batch, rank) for rank in range(world_size)]
        return [
            [
                row
                for micro in range(batch.accumulation_steps)
                for loader in ranks
                for row in loader.micro_batch(step, micro)["input_ids"].tolist()
            ]
            for step in steps
        ]

    whole = batches(1, range(12))
    assert batches(2, range(7, 12)) == whole[7:]
    assert batches(4, range(3, 5)) == whole[3:5]


def test_columns_of_other_names_are_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"content": "one"}, {"content": "two"}])
    plan = plan_of(path, columns={"text": "content"}, validation_fraction=0.0)
    assert texts_of(prepare(plan)) == ["one", "two"]


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    rows = [{"text": text, "embedding": [0.0] * 100} for text in random_texts(5)]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    files = find_sources(plan_of(path)).files
    (block,) = records.blocks(files[0], frozenset({"text"}))
    found = [row for _, row in records.parse(block)]
    assert found == [{"text": row["text"], "embedding": ...} for row in rows]


def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ColotrainError, match=r"rows\.parquet: cannot be read as parquet"):
        prepare(plan_of(tmp_path / "rows.parquet"))


def test_bpe_learns_from_the_records_of_the_train_split(tmp_path: Path) -> None:
    rows = [{"text": "zebra " * 30} for _ in range(20)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepared = prepare(plan_of(path, tokenizer="bpe-300"))
    assert prepared.tokenizer is not None
    assert "zebra" in json.loads(prepared.tokenizer.read_text())["model"]["vocab"]
    assert decode(prepared, documents_of(prepared, "train")[0][:-1]) == rows[0]["text"]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
@pytest.mark.parametrize("named", ["{}", "{}.bin", "{}.idx"])
def test_a_megatron_pair_is_used_in_place(
    tmp_path: Path, code: int, dtype: str, named: str
) -> None:
    rng = np.random.default_rng()
    documents = [rng.integers(0, 200, rng.integers(1, 60)) for _ in range(50)]
    prefix = write_megatron(tmp_path / "corpus_text_document", documents, code, dtype)
    plan = plan_of(named.format(prefix))

    assert find_sources(plan).kinds == "megatron"
    prepared = prepare(plan)
    found = [documents_of(prepared, split) for split in ("train", "validation")]
    assert found[0] + found[1] == [document.tolist() for document in documents]
    assert found[0]
    assert found[1]
    assert prepared.vocab_size == max(d.max() for d in documents) + 1
    assert not (tmp_path / "cache" / "tokens").exists()


@pytest.mark.parametrize("damage", ["short", "torn", "gap", "type"])
def test_a_megatron_pair_that_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    prefix = write_megatron(tmp_path / "c", [np.arange(30), np.arange(9)], 8, "<u2")
    index, tokens = tmp_path / "c.idx", tmp_path / "c.bin"
    data = bytearray(index.read_bytes())
    if damage == "short":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif damage == "torn":
        index.write_bytes(data[:-5])
    elif damage == "gap":
        data[34 + 4 * 4 + 8] += 2  # where the second sequence begins
        index.write_bytes(data)
    else:
        data[17] = 6
        index.write_bytes(data)
    with pytest.raises(ConfigError, match=r"data\.path="):
        prepare(plan_of(prefix))


def test_many_token_files_are_shards_and_those_named_val_are_validation(tmp_path: Path) -> None:
    for name in ("val_000", "train_000", "train_001"):
        np.arange(40, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    shards = prepare_shards(plan_of(tmp_path))
    assert [(s.train.stem, s.num_train, s.num_validation) for s in shards] == [
        ("train_000", 40, 0),
        ("train_001", 40, 0),
        ("val_000", 0, 40),
    ]


def test_a_tokenizer_folder_gives_its_end_of_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<stop>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<stop>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}})
    )
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b"}, {"text": "b"}])
    plan = plan_of(path, tokenizer=str(tmp_path / "model"), validation_fraction=0.0)
    assert documents_of(prepare(plan), "train") == [[0, 1, 2], [1, 2]]


def test_without_pyarrow_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"text": "a"}])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ColotrainError, match=r"colotrain\[data\]"):
        prepare(plan_of(path))
