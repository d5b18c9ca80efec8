"""Records: JSON, CSV, Parquet and Arrow files, read block by block. No torch here.

One process reads blocks of bytes; others `parse` them into records.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.packed_files import import_pyarrow, open_unpacked
from colotrain.data.prepare.parsed_files import (
    BLOCK_BYTES,
    LABEL_MARK,
    Pieces,
    conll_pieces,
    json_pieces,
    labelled_pieces,
    table_pieces,
)
from colotrain.errors import ColotrainError, fix_of
from colotrain.spec.objectives import IGNORE_INDEX

BLOCK_ROWS = 1024
FEW_ROWS = 32
"""Rows of a block where a column has images."""
IMAGE = "image"
"""Column that is asked for where records have images."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)
"""What pyarrow raises of files that it cannot read beside its own exceptions."""
UNREAD = b"unread"
"""Key of a batch's metadata with the names of columns that are not read: their values are `...`."""
NAMES = b"names"
"""Key of a batch's metadata with names of classes, by column, for their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A few hundred records of one file, as unparsed bytes."""

    file: str
    """Path of the file, as messages show it."""
    name: str
    """Name of the file in the corpus; its hash with a record's number decides the split."""
    split: str | None
    kind: str
    """Kind of `payload`: lines (of JSON), labelled (the same, of a file in fastText's form), table
    (JSON of a table's header and rows) or arrow (an Arrow stream)."""
    numbers: Sequence[int]
    """Number of each line, record or row, from 1."""
    payload: bytes
    done: int
    """Bytes of the file that are read up to the end of this block."""


class BadRecord(Exception):
    """A record that cannot be used; the message says why."""


class UnreadColumn(BadRecord):
    """A record with a column that a setting alone reads: no record is left out for it."""

    def __init__(self, key: str, expected: str) -> None:
        """`key`: the setting, a switch that is off."""
        super().__init__(f"{key}: {expected}")
        self.key, self.expected = key, expected


def blocks(file: DataFile, columns: frozenset[str]) -> Iterator[Block]:
    """The blocks of a file; from Parquet and Arrow only `columns` are read, where they exist."""
    kind, pieces = READERS[file.kind]
    for numbers, payload, done in pieces(file.path, columns):
        yield Block(
            file=str(file.path),
            name=file.name,
            split=file.split,
            kind=kind,
            numbers=numbers,
            payload=payload,
            done=done,
        )


def parse(
    block: Block, labels: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Each record of a block with its number, or a `BadRecord` where it cannot be parsed.

    `labels`: columns with classes, of which a record's first one has names in place of the numbers
    of classes that the file lists.
    """
    if block.kind == "arrow":
        with _errors_told(f"{block.file}: its rows cannot be read"):
            yield from zip(block.numbers, _from_arrow(block.payload, labels), strict=True)
    elif block.kind == "table":
        header, *rows = json.loads(block.payload)
        for number, row in zip(block.numbers, rows, strict=True):
            yield number, _from_row(header, row)
    else:
        read = _from_labelled_line if block.kind == "labelled" else _from_line
        for number, line in zip(block.numbers, block.payload.split(b"\n"), strict=False):
            if line.strip():
                yield number, read(line)


def _from_row(header: list[str], row: list[str]) -> dict[str, Any] | BadRecord:
    if len(row) != len(header):
        return BadRecord(f"expected {len(header)} fields as in the header, not {len(row)}")
    return dict(zip(header, row, strict=True))


def _from_line(line: bytes) -> dict[str, Any] | BadRecord:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return BadRecord("UTF-16: convert the file to UTF-8")
    try:
        found = json.loads(line)
    except RecursionError:
        return BadRecord("nested too deeply")
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return BadRecord(f"not JSON ({error})")
    if not isinstance(found, dict):
        return BadRecord(f"expected a JSON object, not {type(found).__name__}")
    return found


def _from_labelled_line(line: bytes) -> dict[str, Any] | BadRecord:
    found = _from_line(line)
    words = [] if isinstance(found, BadRecord) else str(found["text"]).split()
    late = next((word for word in words if word.startswith(LABEL_MARK)), None)
    if late is not None:
        return BadRecord(f"{late} is within the text: classes stand before it")
    return found


def _lines(path: Path) -> Pieces:
    """Complete lines, about `BLOCK_BYTES` at a time."""
    with open_unpacked(path) as file:
        number = 1
        while lines := file.read_lines(BLOCK_BYTES):
            count = lines.count(b"\n") + (not lines.endswith(b"\n"))
            yield range(number, number + count), lines, file.tell()
            number += count


def _rows(kind: str, path: Path, batches: Iterator[tuple[Any, float]]) -> Pieces:
    """Rows as Arrow streams; the bytes read are estimated from the share of rows."""
    pa = import_pyarrow()
    number, size = 1, path.stat().st_size
    with _errors_told(f"{path}: cannot be read as {kind}"):
        for batch, share in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            numbers = range(number, number + batch.num_rows)
            yield numbers, sink.getvalue().to_pybytes(), int(size * share)
            number += batch.num_rows


@contextmanager
def _errors_told(problem: str) -> Iterator[None]:
    """Raise `ColotrainError` for what pyarrow raises of files that are damaged or out of reach."""
    try:
        yield
    except (import_pyarrow().ArrowException, *UNREADABLE) as error:
        problem = f"{problem} ({' '.join(str(error).split())})"
        raise ColotrainError(problem, fix_of(error, "copy it again, or set data.format")) from error


def _parquet_batches(path: Path, columns: frozenset[str]) -> Iterator[tuple[Any, float]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if name in columns] or None
        total, done = max(file.metadata.num_rows, 1), 0
        for batch in file.iter_batches(batch_size=_rows_of_block(columns), columns=wanted):
            done += batch.num_rows
            yield _with_unread(batch, file.schema_arrow), done / total


def _rows_of_block(columns: frozenset[str]) -> int:
    return FEW_ROWS if IMAGE in columns else BLOCK_ROWS


def _arrow_batches(path: Path, columns: frozenset[str]) -> Iterator[tuple[Any, float]]:
    """Batches of an Arrow stream (as the datasets library writes) or file, in small slices."""
    pa = import_pyarrow()
    with pa.memory_map(str(path)) as source:
        for batch in _stored_batches(source):
            wanted = [name for name in batch.schema.names if name in columns] or batch.schema.names
            share = source.tell() / max(source.size(), 1)
            step = _rows_of_block(columns)
            for at in range(0, batch.num_rows, step):
                rows = batch.select(wanted).slice(at, step)
                yield _with_unread(rows, batch.schema), share


def _with_unread(batch: Any, schema: Any) -> Any:
    """The batch, if it can be copied, which knows the names of the file's other columns."""
    batch.validate()  # its first and last offsets are within the file; `_from_arrow` looks at all
    others = [name for name in schema.names if name not in batch.schema.names]
    names = _names_of_classes(schema)
    return batch.replace_schema_metadata({UNREAD: json.dumps(others), NAMES: json.dumps(names)})


def names_of_classes(file: DataFile, columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes that a file itself lists for the first of `columns` that it has."""
    if READERS[file.kind][0] != "arrow":
        return ()
    with _errors_told(f"{file.path}: cannot be read as {file.kind}"):
        schema = _schema_of(file)
        named = _names_of_classes(schema)
    column = next((name for name in columns if name in schema.names), "")
    return tuple(named.get(column, ()))


def _schema_of(file: DataFile) -> Any:
    if file.kind == "parquet":
        import pyarrow.parquet as pq

        return pq.read_schema(file.path)
    with import_pyarrow().memory_map(str(file.path)) as source:
        return next(_stored_batches(source)).schema


def _names_of_classes(schema: Any) -> dict[str, list[str]]:
    """Column → names of the classes whose numbers it has, as the datasets library writes them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = {name: _names_in(feature) for name, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: names for name, names in found.items() if names}


def _names_in(feature: Any) -> list[str]:
    """The names of a column of classes, or of lists of classes."""
    if isinstance(feature, list):
        feature = feature[0] if feature else None
    if isinstance(feature, dict) and feature.get("_type") != "ClassLabel":
        feature = feature.get("feature")
    names = feature.get("names") if isinstance(feature, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _with_names(
    record: dict[str, Any], labels: Sequence[str], named: dict[str, list[str]]
) -> dict[str, Any] | BadRecord:
    column = next((name for name in labels if record.get(name) is not None), None)
    if column is None or column not in named:
        return record
    try:
        return record | {column: _as_names(column, record[column], named[column])}
    except BadRecord as error:
        return error


def _as_names(column: str, value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [one if one == IGNORE_INDEX else _as_names(column, one, names) for one in value]
    if isinstance(value, int) and not 0 <= value < len(names):
        raise BadRecord(f"{column}: {value} is none of the file's {len(names)} classes")
    return names[value] if isinstance(value, int) else value


def _stored_batches(source: Any) -> Iterator[Any]:
    pa = import_pyarrow()
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
        return
    source.seek(0)
    yield from pa.ipc.open_stream(source)


def _from_arrow(payload: bytes, labels: Sequence[str]) -> Iterator[dict[str, Any] | BadRecord]:
    pa = import_pyarrow()
    stream = pa.ipc.open_stream(payload)
    unread = dict.fromkeys(json.loads(stream.schema.metadata[UNREAD]), ...)
    named: dict[str, list[str]] = json.loads(stream.schema.metadata[NAMES])
    for batch in stream:
        batch.validate(full=True)  # offsets may point anywhere, and texts be no UTF-8
        for row in batch.to_pylist():
            found = {name: _without_nulls(value) for name, value in row.items()}
            yield _with_names(found | unread, labels, named)


def _without_nulls(value: Any) -> Any:
    """The value without empty fields of objects: Arrow gives each the fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


READERS: dict[str, tuple[str, Callable[[Path, frozenset[str]], Pieces]]] = {
    "jsonl": ("lines", lambda path, _: _lines(path)),
    "json": ("lines", lambda path, _: json_pieces(path)),
    "csv": ("table", lambda path, _: table_pieces(path)),
    "conll": ("lines", lambda path, _: conll_pieces(path)),
    "fasttext": ("labelled", lambda path, _: labelled_pieces(path)),
    "parquet": ("arrow", lambda path, names: _rows("parquet", path, _parquet_batches(path, names))),
    "arrow": ("arrow", lambda path, names: _rows("arrow", path, _arrow_batches(path, names))),
}
"""Format → `Block.kind` of its pieces, and function of a path and columns that reads them."""
