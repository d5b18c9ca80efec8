"""Corpora: finding, splitting and reading text files. No torch here."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import DataPlan

Progress = Callable[[str, int, int], None]
"""Callback for progress: (name of the activity, amount done, total)."""

PIECE_BYTES = 1 << 18
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of data."""

    name: str
    """POSIX path relative to the folder that the user named."""
    path: Path
    kind: str = "text"
    """Format of its content: one of `formats.FORMATS`."""
    split: str | None = None
    """The split that all of it is in; None: a part of every such file is validation."""

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The bytes `start` to `stop` of a file: one document of a split."""

    path: Path
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


def text_files(files: Sequence[DataFile]) -> list[DataFile]:
    """The text files among `files`; as in git, a file with a NUL near its start is not text."""
    found = [file for file in files if _is_text(file.path)]
    if not found:
        names = ", ".join(str(file.path) for file in files[:3])
        raise wrong_path(names, "text files (these are binary files)", "convert them to UTF-8 text")
    return found


def is_validation(relative_name: str, fraction: float) -> bool:
    """Whether a file belongs to validation, decided by a hash of its relative name alone."""
    digest = hashlib.sha256(relative_name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split(files: Sequence[DataFile], fraction: float) -> tuple[list[Span], list[Span]]:
    """Documents of train and of validation; empty files are left out.

    Files with a split of their own are in it. Otherwise the split is by file (`is_validation`). If
    that leaves one side empty, as with a single file, the end of every file is validation instead.
    """
    if any(file.split for file in files):
        spans = {
            side: [
                Span(path=file.path, start=0, stop=file.size_bytes)
                for file in files
                if file.split == side and file.size_bytes
            ]
            for side in ("train", "validation")
        }
        return spans["train"], spans["validation"]
    sizes = [(file, file.path.stat().st_size) for file in files]
    whole = [(file, Span(path=file.path, start=0, stop=size)) for file, size in sizes if size]
    held = [span for file, span in whole if is_validation(file.name, fraction)]
    kept = [span for file, span in whole if not is_validation(file.name, fraction)]
    if (held and kept) or fraction == 0:
        return kept, held
    cuts = [(span, _cut(span, fraction)) for _, span in whole]
    front = [Span(path=span.path, start=0, stop=cut) for span, cut in cuts]
    back = [Span(path=span.path, start=cut, stop=span.stop) for span, cut in cuts]
    return [span for span in front if span.size_bytes], [span for span in back if span.size_bytes]


def read_pieces(span: Span) -> Iterator[str]:
    """The text of a span, in pieces cut at line ends; a very long line is cut anyway.

    Bytes that are not UTF-8 become U+FFFD, and a byte order mark at a file's start is left out;
    nothing else is changed (no newline translation).
    """
    encoding = "utf-8" if span.start else "utf-8-sig"
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    held, left = "", span.size_bytes
    with span.path.open("rb") as file:
        file.seek(span.start)
        while left:
            data = file.read(min(PIECE_BYTES, left))
            left = left - len(data) if data else 0
            text = held + decoder.decode(data, final=left == 0)
            end = text.rfind("\n") + 1 if left else len(text)
            piece, held = (text[:end], text[end:]) if end else (text, "")
            if piece:
                yield piece


def fingerprint(files: Sequence[DataFile], salt: str) -> str:
    """Hash of names, paths, sizes and modification times, computed without opening any file."""
    digest = hashlib.sha256(salt.encode())
    for file in files:
        stat = file.path.stat()
        place = f"{file.kind} {file.split}\0{file.name}\0{file.path.absolute()}"
        line = f"{place}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def content_key(files: Sequence[DataFile], salt: str, report: Progress) -> str:
    """Hash of names and contents, independent of the files' folder."""
    digest = hashlib.sha256(salt.encode())
    total, done = sum(file.path.stat().st_size for file in files), 0
    for file in files:
        content = hashlib.sha256()
        with file.path.open("rb") as source:
            while data := source.read(1 << 20):
                content.update(data)
                done += len(data)
                report("reading", done, total)
        about = f"{file.kind} {file.split}\0{file.name}"
        digest.update(f"{about}\0{content.hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def standard_library(plan: DataPlan) -> list[DataFile]:
    if plan.corpus != "stdlib":
        raise ConfigError([Problem(key="data.corpus", value=plan.corpus, expected="stdlib")])
    root = Path(sysconfig.get_path("stdlib"))
    files = _python_files(root)
    if not files:
        problem = Problem(
            key="data.corpus",
            value="stdlib",
            expected=f"Python sources under {root}",
            fix="name text files of your own with data.path",
        )
        raise ConfigError([problem])
    return list(files)


@cache
def _python_files(root: Path) -> tuple[DataFile, ...]:
    """The Python sources of a standard library, sorted by name; it stays while a process runs."""
    files = (file for file in _walk(root, left_out=LEFT_OUT) if file.name.endswith(".py"))
    return tuple(sorted(files, key=lambda file: file.name))


def expand(path: str, key: str = "data.path") -> list[DataFile]:
    """The files that an entry of `data.path` names, found without opening any of them.

    The entry is a folder (all files below it but hidden ones), a file, or a glob, whose files have
    names relative to its root. They are sorted by name. Raises `ConfigError` if there are none.
    """
    found: list[DataFile] = []
    root = root_of(path)
    for match in map(Path, matches(path)):
        if match.is_file():
            found.append(DataFile(name=match.relative_to(root).as_posix(), path=match))
        else:
            inside = "" if match == root else f"{match.relative_to(root).as_posix()}/"
            found += [DataFile(name=inside + file.name, path=file.path) for file in _walk(match)]
    if not found:
        fix = f"correct the path (now in {Path.cwd()})"
        raise wrong_path(path, "a folder, file or glob of data files that exist", fix, key=key)
    return sorted(found, key=lambda file: file.name)


def matches(path: str) -> list[str]:
    """Paths that one entry of `data.path` names: itself, or the glob's matches, sorted."""
    literal = str(Path(path).expanduser())
    if os.path.exists(literal):
        return [literal]
    return sorted(glob.glob(literal, recursive=True))


def root_of(path: str) -> Path:
    """Folder that names are relative to: itself, a file's, or the longest fixed part of a glob."""
    literal = Path(path).expanduser()
    if literal.is_dir():
        return literal
    root = literal.parent
    while not literal.exists() and glob.has_magic(str(root)):
        root = root.parent
    return root


def _walk(root: Path, *, left_out: frozenset[str] = frozenset()) -> Iterator[DataFile]:
    """The files below `root`, in no order; hidden ones are left out.

    Folders that cannot be read, and links to folders, are left out, too. Works on strings: a path
    object per entry would take most of the time.
    """
    below = [""]
    while below:
        inner = below.pop()
        try:
            entries = os.scandir(os.path.join(root, inner))
        except OSError:
            continue
        with entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if name != "__pycache__" and name not in left_out:
                        below.append(f"{inner}{name}/")
                elif _is_file(entry):
                    yield DataFile(name=inner + name, path=Path(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file, or a link to one; a link to itself is neither, and no error."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def _cut(span: Span, fraction: float) -> int:
    """Byte at which to cut off about `fraction` of a file: a line's start, else a character's."""
    target = span.stop - int(span.size_bytes * fraction)
    with span.path.open("rb") as file:
        file.seek(target)
        data = file.read(PIECE_BYTES)
    line_end = target + data.find(b"\n") + 1
    if target < line_end < span.stop:
        return line_end
    inside = len(data[:3]) - len(data[:3].lstrip(bytes(range(0x80, 0xC0))))
    return target + inside  # past the continuation bytes of a character


def wrong_path(value: str, expected: str, fix: str, *, key: str = "data.path") -> ConfigError:
    """Error about an entry of `data.path`."""
    return ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])
