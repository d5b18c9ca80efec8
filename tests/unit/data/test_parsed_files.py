"""JSON documents and tables are read like JSON lines, whatever their layout, in bounded memory."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colotrain.data.prepare import parsed_files, records
from colotrain.data.prepare.formats import kind_of
from colotrain.data.prepare.sources import find_sources
from colotrain.data.prepare.tokens import prepare
from colotrain.errors import ColotrainError, ConfigError
from colotrain.spec.plan import DataPlan
from tests.formats import random_texts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(path: Path, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 16,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.0,
        "workers": 1,
    }
    return DataPlan(**{**settings, **changes})


def read(path: Path) -> list[Any]:
    (file,) = find_sources(plan_of(path)).files
    blocks = records.blocks(file, frozenset())
    return [record for block in blocks for _, record in records.parse(block)]


def numbers_of(path: Path) -> list[int]:
    (file,) = find_sources(plan_of(path)).files
    return [n for block in records.blocks(file, frozenset()) for n, _ in records.parse(block)]


def random_value(depth: int = 0) -> Any:
    text = random.choice(random_texts(3))
    simple = [None, True, random.random() * 10 ** random.randint(-9, 20), random.getrandbits(70)]
    if depth < 3 and random.random() < 0.5:
        values = [random_value(depth + 1) for _ in range(random.randint(0, 3))]
        return values if random.random() < 0.5 else {f"{i}{text}": v for i, v in enumerate(values)}
    return random.choice([*simple, text])


LAYOUTS: dict[str, Callable[[list[Any]], str]] = {
    "one line": json.dumps,
    "indented": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "a record per line": lambda rows: "[\n" + ",\r\n".join(map(json.dumps, rows)) + "\n]\n",
    "under data": lambda rows: json.dumps({"version": [1], "data": rows, "rest": {"data": []}}),
    "under data, indented": lambda rows: json.dumps({"data": rows}, indent=1),
    "objects one after another": lambda rows: "\n".join(json.dumps(r, indent=3) for r in rows),
    "with a byte order mark": lambda rows: "\ufeff" + json.dumps(rows, ensure_ascii=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("piece", [7, 100, 1 << 20])
def test_records_of_a_json_document_are_those_that_were_written(
    tmp_path: Path, layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed_files, "BLOCK_BYTES", piece)
    rows = [{"text": random_value(), "more": random_value()} for _ in range(30)]
    path = tmp_path / "rows.json"
    path.write_bytes(LAYOUTS[layout](rows).encode())
    assert kind_of(path) == "json"
    assert read(path) == rows
    assert numbers_of(path) == list(range(1, 31))


def test_one_object_is_one_record_where_it_is_named_or_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"text": name}, indent=1))
    assert read(tmp_path / "a.json") == [{"text": "a"}]
    prepared = prepare(plan_of(tmp_path))
    assert bytes(prepared.tokens("train").astype("u1")) == b"a\0b\0"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"text": "a"}, {"text": "b"', "record 2: expected JSON"),
        ('[{"text": "a"} {"text": "b"}]', "record 2: expected JSON (',' is missing)"),
        ('[{"text": "a"}, {"text": b}]' + " " * 99, "record 2: expected JSON (Expecting value)"),
        ('[{"text": "a"}]]', "record 2: expected JSON ('{' is missing)"),
        ('[{"text": "a"}, ]', "record 2: expected JSON (Expecting value)"),
        ('{"data": [{"text": "a"}], 3: 4}', "record 2: expected an object's key in quotes"),
        ('[{"text": "caf\xe9"}]', "record 1: expected UTF-8 text"),
        ('[{"text": "a"}, 3]', ":2: expected a record that can be used (expected a JSON object"),
        (
            '{"data": [{"title": "x", "paragraphs": []}]}',
            ":1: expected a record that can be used (expected text, or prompt and completion, or "
            "messages; it has title, paragraphs)",
        ),
        ('{"train": [{"text": "x"}]}', "it has train)"),
    ],
)
def test_what_is_wrong_with_a_document_is_said_with_file_and_record(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        prepare(plan_of(path))
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_an_error_in_a_large_document_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with path.open("w") as file:
        file.write('[{"text": "a"}, {"text" "b"}, ')
        for _ in range(300):
            file.write(json.dumps({"text": "x" * 100_000}) + ",")
        file.write('{"text": "c"}]')
    tracemalloc.start()
    with pytest.raises(ConfigError, match="record 2"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    path.write_text(path.read_text().replace('"text" "b"', '"text": "b"'))
    (file_,) = find_sources(plan_of(path)).files
    tracemalloc.reset_peak()
    assert sum(len(block.payload) for block in records.blocks(file_, frozenset())) > 30e6
    assert tracemalloc.get_traced_memory()[1] < 20e6 + tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


FIELDS = [
    "plain",
    "",
    "with, comma",
    'with "quotes"',
    "two\nlines",
    "three\r\n\r\nlines",
    "\t",
    ";",
    "é",
]


@pytest.mark.parametrize("dialect", ["csv", "semicolons", "tsv"])
@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_rows_of_a_table_are_those_that_were_written(
    tmp_path: Path, dialect: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed_files, "BLOCK_BYTES", piece)
    separator = {"csv": ",", "semicolons": ";", "tsv": "\t"}[dialect]
    rows = [
        {"prompt": f"{i}{random.choice(FIELDS)}", "completion": random.choice(FIELDS)}
        for i in range(60)
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "completion"], delimiter=separator)
    writer.writeheader()
    starts = []
    for row in rows:
        starts.append(text.getvalue().count("\n") + 1)
        writer.writerow(row)
    path = tmp_path / f"rows.{'tsv' if dialect == 'tsv' else 'csv'}"
    path.write_bytes(random.choice([b"", b"\xef\xbb\xbf"]) + text.getvalue().encode())
    assert read(path) == rows
    assert numbers_of(path) == starts  # where an editor shows them


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('text\nfine\n"never closed\nand more\n', ":3: expected a row that can be read"),
        ('text\n"closed" early\n', ":2: expected a row that can be read"),
        ("text,text\na,b\n", ":1: expected columns with different names (two are called 'text')"),
        (
            "text,id\na,1\nb\n",
            ":3: expected a record that can be used (expected 2 fields as in the",
        ),
        ("text,id\na,1\nb,2,3\n", ":3: expected a record that can be used (expected 2 fields"),
        ("text\nfine\ncaf\xe9\n", ":3: expected UTF-8 text"),
        ("once upon a time\nthere was\n", "or messages; it has once upon a time)"),
        ("text\n", "expected records to train on"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_file_and_line(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        prepare(plan_of(path))
    assert told in str(caught.value)


def zstd(data: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow")
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_compressed_files_are_read_and_torn_ones_refused(
    tmp_path: Path, kind: str, ending: str
) -> None:
    rows = [{"text": text} for text in random_texts(50)]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows([["text"], *([row["text"]] for row in rows)])
    plain = {
        "jsonl": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows),
        "csv": text.getvalue(),
    }[kind]
    path = tmp_path / f"rows.{kind}{ending}"
    packed = PACK[ending](plain.encode())
    path.write_bytes(packed)
    assert find_sources(plan_of(path)).kinds == kind
    assert read(path) == rows
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ColotrainError, match=r"rows\.\w+\.\w+: not a whole "):
        prepare(plan_of(path, format=kind))
