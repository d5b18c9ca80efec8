"""Files whose records have to be found by parsing: JSON, tables and CoNLL's lists. No torch here.

All are read in bounded memory: a few records at a time.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from colotrain.data.prepare.formats import LISTS
from colotrain.data.prepare.packed_files import UnpackedFile, open_unpacked
from colotrain.errors import ConfigError, Problem

BLOCK_BYTES = 1 << 20
MOST_FIELD_BYTES = 1 << 26
"""Longest field of a table or value in JSON: one that is never closed must not fill the memory."""
NEAR_END = 16
"""Characters before the end of a text within which an error may be that more is to come."""
AFTER_VALUES = " \t\r\n,:]}"

Pieces = Iterator[tuple[Sequence[int], bytes, int]]
"""Numbers of records, their bytes, and the number of bytes of the file that are read."""


def json_pieces(path: Path) -> Pieces:
    """The records of a JSON document, each as a line of JSON; their numbers are places from 1.

    The records are the objects of an array, or of the array that an object has under one of
    `LISTS`; without one the object is the only record. Raises `ConfigError` for what is no JSON.
    """
    lines: list[str] = []
    number, size = 1, 0
    with open_unpacked(path) as file:
        document = JsonDocument(path, file)
        for line in document.records():
            lines.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield range(number, number + len(lines)), "\n".join(lines).encode(), file.tell()
                number, size, lines = number + len(lines), 0, []
        yield range(number, number + len(lines)), "\n".join(lines).encode(), file.tell()


class JsonDocument:
    """A JSON document whose values are read one after another."""

    def __init__(self, path: Path, file: UnpackedFile) -> None:
        self.path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False
        self._num_records = 0

    def records(self) -> Iterator[str]:
        """The JSON text of each record, without line breaks."""
        while first := self._peek():
            found = self._array() if first == "[" else self._object()
            for text in found:
                self._num_records += 1
                yield text.replace("\r", " ").replace("\n", " ")

    def _array(self) -> Iterator[str]:
        self._take("[")
        if self._peek() == "]":
            self._take("]")
            return
        while True:
            yield self._value()
            if self._peek() == "]":
                self._take("]")
                return
            self._take(",")

    def _object(self) -> Iterator[str]:
        """The records of the object's array, or else the object itself."""
        pairs: list[str] = []
        had_list = False
        self._take("{")
        while self._peek() != "}":
            if pairs or had_list:
                self._take(",")
            key = self._value(start='"')
            self._take(":")
            if json.loads(key) in LISTS and not had_list and self._begins_list():
                had_list = True
                yield from self._array()
            else:
                pairs.append(f"{key}:{self._value()}")
        self._take("}")
        if not had_list:
            yield f"{{{','.join(pairs)}}}"

    def _begins_list(self) -> bool:
        """Whether an array of objects comes next."""
        if self._peek() != "[":
            return False
        while not (after := self._text[self._at + 1 :].lstrip()) and not self._ended:
            self._read(BLOCK_BYTES)
        return after[:1] == "{"

    def _value(self, start: str = "") -> str:
        """The text of the next value, which begins with `start`."""
        if start and self._peek() != start:
            raise self._error("an object's key in quotes")
        self._peek()
        decoder, size = json.JSONDecoder(), BLOCK_BYTES
        while True:
            try:
                _, end = decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self._error("values that are not nested so deeply") from error
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - NEAR_END or "Unterminated" in error.msg
                if self._ended or not cut:
                    raise self._error(f"JSON ({error.msg})") from error
            else:
                cut = self._text[end : end + 1] not in tuple(AFTER_VALUES)  # as in 1.5e
                if self._ended or not cut or len(self._text) - end > NEAR_END:
                    text, self._at = self._text[self._at : end], end
                    return text
            if len(self._text) - self._at > MOST_FIELD_BYTES:
                fix = "write a record a line (JSONL), or divide the record"
                raise self._error(f"values of at most {MOST_FIELD_BYTES >> 20} MiB", fix)
            self._read(size)
            size *= 2

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"JSON ({character!r} is missing)")
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read(BLOCK_BYTES)

    def _read(self, size: int) -> None:
        data = self._file.read(size)
        self._ended = not data
        try:
            self._text = self._text[self._at :] + self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._error("UTF-8 text", "convert it to UTF-8") from error
        self._at = 0

    def _error(self, expected: str, fix: str = "correct the file") -> ConfigError:
        key = f"{self.path}: record {self._num_records + 1}"
        return ConfigError([Problem(key=key, expected=expected, fix=fix)])


def table_pieces(path: Path) -> Pieces:
    """The rows of a table, each block with the header; their numbers are those of their lines.

    Fields are separated by tabs in a `.tsv` file, and otherwise by the first of comma, semicolon
    and tab that the header has; quotation marks are those of RFC 4180.
    """
    with open_unpacked(path) as file:
        lines = _decoded_lines(path, file)
        first = next(lines, "")
        csv.field_size_limit(MOST_FIELD_BYTES)
        table = csv.reader(chain([first], lines), delimiter=_separator(path, first), strict=True)
        header: list[str] | None = None
        rows: list[list[str]] = []
        numbers: list[int] = []
        number, size = 1, 0
        try:
            for row in table:
                if header is None:
                    header = _checked_header(path, row) if row else None
                elif row:
                    rows.append(row)
                    numbers.append(number)
                    size += sum(map(len, row))
                number = table.line_num + 1
                if size >= BLOCK_BYTES:
                    yield numbers, json.dumps([header or [], *rows]).encode(), file.tell()
                    rows, numbers, size = [], [], 0
        except csv.Error as error:
            raise _no_table(path, number, f"a row that can be read ({error})") from error
        yield numbers, json.dumps([header or [], *rows]).encode(), file.tell()


DOCUMENT = "-DOCSTART-"
"""First field of the lines of CoNLL's files that stand before a document."""


UNIVERSAL = 10
"""Fields of a word in CoNLL-U, which begin with its number."""


def conll_pieces(path: Path) -> Pieces:
    """The texts of a file in CoNLL's form, each as a line of JSON with `tokens` and `labels`.

    A line has a word first and its class last, separated by tabs or spaces; other fields between
    them are not read. Empty lines are between texts. A text's number is that of its first line.
    """
    texts: list[str] = []
    numbers: list[int] = []
    words: list[list[str]] = []
    size = number = 0

    def finish() -> None:
        if words:
            text = {"tokens": [row[0] for row in words], "labels": [row[-1] for row in words]}
            texts.append(json.dumps(text))
            numbers.append(number - len(words))
            words.clear()

    with open_unpacked(path) as file:
        for number, line in enumerate(_decoded_lines(path, file), 1):
            fields = _fields(line)
            if not words and (line.startswith("# ") or _is_universal(fields)):
                expected = "a word first and its class last, without comments, not CoNLL-U"
                fix = "write columns of words and classes alone, or records with tokens and labels"
                raise _no_table(path, number, expected, fix)
            if not fields or fields[0] == DOCUMENT:
                finish()
            elif len(fields) < 2 or (words and len(fields) != len(words[0])):
                expected = f"{len(words[0])} fields as above" if words else "a word and its class"
                raise _no_table(path, number, f"{expected}, not {len(fields)}")
            else:
                words.append(fields)
                size += len(line)
            if size >= BLOCK_BYTES and not words:
                yield numbers, "\n".join(texts).encode(), file.tell()
                texts, numbers, size = [], [], 0
        number += 1
        finish()
        yield numbers, "\n".join(texts).encode(), file.tell()


LABEL_MARK = "__label__"
"""What fastText's lines have before the name of a class."""


def labelled_pieces(path: Path) -> Pieces:
    """The lines of a file in fastText's form, each as a line of JSON with `text` and `label`.

    A line has `__label__CLASS` before its text. One with several classes has the list of them, and
    one without has no label.
    """
    texts: list[str] = []
    numbers: list[int] = []
    size = 0
    with open_unpacked(path) as file:
        for number, line in enumerate(_decoded_lines(path, file), 1):
            classes, rest = [], line.strip()
            while rest.startswith(LABEL_MARK):
                name, *others = rest.split(maxsplit=1)
                classes.append(name.removeprefix(LABEL_MARK))
                rest = others[0] if others else ""
            if classes or rest:
                label = classes[0] if len(classes) == 1 else classes or None
                texts.append(json.dumps({"text": rest, "label": label}))
                numbers.append(number)
                size += len(line)
            if size >= BLOCK_BYTES:
                yield numbers, "\n".join(texts).encode(), file.tell()
                texts, numbers, size = [], [], 0
        yield numbers, "\n".join(texts).encode(), file.tell()


def _fields(line: str) -> list[str]:
    line = line.strip("\r\n")
    if not line.strip():
        return []
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _is_universal(fields: Sequence[str]) -> bool:
    """Whether these are the fields of the first word of a sentence in CoNLL-U."""
    return len(fields) == UNIVERSAL and fields[0].partition("-")[0] == "1"


def _separator(path: Path, header: str) -> str:
    if ".tsv" in path.suffixes:
        return "\t"
    return next((character for character in ",;\t" if character in header), ",")


def _checked_header(path: Path, header: list[str]) -> list[str]:
    twice = next((name for name, count in Counter(header).items() if count > 1), None)
    if twice is not None:
        raise _no_table(path, 1, f"columns with different names (two are called {twice!r})")
    return header


def _decoded_lines(path: Path, file: UnpackedFile) -> Iterator[str]:
    """Lines with their ends; raises `ConfigError` where the bytes are not UTF-8."""
    number = 0
    while lines := file.read_lines(BLOCK_BYTES):
        for line in io.BytesIO(lines):
            number += 1
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                fix = "convert it to UTF-8"
                raise _no_table(path, number, f"UTF-8 text ({error.reason})", fix) from error


def _no_table(path: Path, number: int, expected: str, fix: str = "correct the file") -> ConfigError:
    return ConfigError([Problem(key=f"{path}:{number}", expected=expected, fix=fix)])
