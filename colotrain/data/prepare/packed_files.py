"""Files that may be compressed, read as what they hold. No torch here."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from colotrain.errors import ColotrainError, ConfigError, Problem

PACKINGS = (".gz", ".bz2", ".xz", ".zst")
MOST_LINE_BYTES = 1 << 25
"""Longest line of records: one without an end must not fill the memory."""
BROKEN = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError)


class UnpackedFile:
    """A file's content, unpacked as the ending of its name says, and its position on the disk."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self._path, self._raw, self._num_lines = path, raw, 0
        self._ending = next((e for e in PACKINGS if path.name.lower().endswith(e)), "")
        self.content: IO[bytes] = self._open()

    def _open(self) -> Any:
        if self._ending == ".gz":
            return gzip.GzipFile(fileobj=self._raw)
        if self._ending == ".bz2":
            return bz2.BZ2File(self._raw)
        if self._ending == ".xz":
            return lzma.LZMAFile(self._raw)
        if self._ending == ".zst":
            pa = import_pyarrow()
            return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(self._raw), "zstd"))
        return self._raw

    def read(self, size: int) -> bytes:
        """The next `size` bytes at most; empty at the end."""
        with self._whole():
            return self.content.read(size)

    def read_lines(self, size: int) -> bytes:
        """Complete lines, of about `size` bytes in all; empty at the end.

        Raises `ConfigError` for a line of more than `MOST_LINE_BYTES`.
        """
        with self._whole():
            lines = self.content.read(size)
            if lines and not lines.endswith(b"\n"):
                rest = self.content.readline(MOST_LINE_BYTES + 1)
                if len(rest) > MOST_LINE_BYTES:
                    raise self._too_long(lines)
                lines += rest
        self._num_lines += lines.count(b"\n")
        return lines

    def _too_long(self, before: bytes) -> ConfigError:
        number = self._num_lines + before.count(b"\n") + 1
        expected = f"a line of at most {MOST_LINE_BYTES >> 20} MiB"
        fix = "divide the record, or set data.format=text for a text without lines"
        return ConfigError([Problem(key=f"{self._path}:{number}", expected=expected, fix=fix)])

    def tell(self) -> int:
        """Number of bytes of the file on the disk that are read."""
        return self._raw.tell()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (*BROKEN, OSError) as error:
            if not self._ending or (isinstance(error, OSError) and error.errno):
                raise
            kind = {".gz": "gzip"}.get(self._ending, self._ending)
            problem = f"{self._path}: not a whole {kind} file ({error})"
            raise ColotrainError(problem, "copy it again") from error


@contextmanager
def open_unpacked(path: Path) -> Iterator[UnpackedFile]:
    """Open a file for reading what it holds; raises `ColotrainError` while it is read if torn."""
    with path.open("rb") as raw:
        yield UnpackedFile(path, raw)


def import_pyarrow() -> Any:
    """Import pyarrow; raises `ColotrainError` with the command that installs it."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        problem = "Parquet, Arrow and .zst files need the pyarrow package"
        raise ColotrainError(problem, "pip install 'colotrain[data]'") from error
    return pyarrow
