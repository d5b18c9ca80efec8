"""The cache of prepared data. One process makes an entry, which appears only when it is complete.

CACHE/index/FINGERPRINT.json   key of the entry for files with these sizes and times
CACHE/index/FINGERPRINT.lock   locked by the process that prepares them
CACHE/making/FINGERPRINT/      files that it is writing
CACHE/tokens/KEY/              finished entry, renamed from `making`
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colotrain import cache_folder
from colotrain.data.prepare.corpora import Progress
from colotrain.errors import ColotrainError
from colotrain.rundir import read_json, write_atomically

WAIT_S = 1800
POLL_S = 0.05


class Cache:
    """Paths of the cache, with look-up, locks and publishing of entries."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = cache_folder.usable_folder(path.absolute() if path else None)

    def entry(self, key: str) -> Path:
        return self.path / "tokens" / key

    def is_trusted(self, key: str) -> bool:
        """Whether no other user can have written an entry, unless the cache is shared with them."""
        self._folder("tokens", make=False)
        return cache_folder.are_own(self.entry(key))

    def readers(self, files: Iterable[Path]) -> int:
        """Return who in a shared cache may read all of the files: 0o040 the group, 0o004 others."""
        group, readers = self._folder("tokens").stat().st_gid, 0o044
        for about in (path.stat() for path in files):
            others = about.st_mode & 0o004
            readers &= about.st_mode if about.st_gid == group else others | others << 3
        return readers

    def key_for(self, content: str, readers: int) -> str:
        """Return a content's key, of one's own where not all who share the cache may read it."""
        shared = cache_folder.shared_bits(self._folder("tokens"))
        return f"{content}-{os.geteuid()}" if shared & 0o044 & ~readers else content

    def recall(self, fingerprint: str) -> dict[str, Any] | None:
        """Return the answer that `remember` stored for this fingerprint, or None."""
        try:
            file = self._folder("index", make=False) / f"{fingerprint}.json"
            found = read_json(file, cache_folder.open_own)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remember(self, fingerprint: str, answer: dict[str, Any]) -> None:
        path = self._index(fingerprint, "json")
        write_atomically(path, json.dumps(answer))
        cache_folder.set_mode(path)

    @contextmanager
    def lock(self, fingerprint: str, report: Progress) -> Iterator[None]:
        """Hold the fingerprint's lock, waiting for the process that has it (at most `WAIT_S`).

        The lock is `flock`'s, which is released when its holder dies for any reason.
        """
        path = self._index(fingerprint, "lock")
        with path.open("a+") as file:
            cache_folder.set_mode(path)
            _wait(file.fileno(), path, report)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    @contextmanager
    def publish(self, fingerprint: str, key: str, *, readers: int = 0o044) -> Iterator[Path]:
        """Yield a folder that becomes `entry(key)` when the block ends without an error.

        Other users of a shared cache may read it as far as `readers` (bits of a file's mode) allow.
        The caller must hold the fingerprint's lock: files of a killed holder are removed first.
        """
        self._sweep()
        making, entry = self._folder("making"), self._folder("tokens") / key
        work = making / f"{fingerprint}-{os.geteuid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        cache_folder.set_mode(work, shared=0)  # no other user reads it before it is finished
        shared = cache_folder.shared_bits(entry.parent) & (readers >> 2) * 0o7
        try:
            yield work
            for path in (*work.iterdir(), work):
                cache_folder.set_mode(path, shared=shared)
                _sync(path)
            _rename(work, entry)
            _sync(entry.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def discard(self, key: str) -> None:
        """Remove a damaged entry at once, so that no reader sees a part of it."""
        grave = self._folder("making") / f"{key}-{os.getpid()}"
        if self.entry(key).exists():
            os.rename(self.entry(key), grave)
            shutil.rmtree(grave, ignore_errors=True)

    def _index(self, fingerprint: str, ending: str) -> Path:
        return self._folder("index") / f"{fingerprint}.{ending}"

    def _folder(self, name: str, *, make: bool = True) -> Path:
        return cache_folder.subfolder(name, top=self.path, make=make)

    def _sweep(self) -> None:
        """Remove unfinished folders of dead processes, whose locks are free."""
        for work in (self.path / "making").glob("*"):
            lock = self._index(work.name.partition("-")[0], "lock")
            if not lock.exists():
                shutil.rmtree(work, ignore_errors=True)
                continue
            with lock.open("a") as file:
                if _try(file.fileno(), lock):
                    shutil.rmtree(work, ignore_errors=True)


def _wait(descriptor: int, path: Path, report: Progress) -> None:
    began = time.monotonic()
    while not _try(descriptor, path):
        waited = time.monotonic() - began
        if waited > WAIT_S:
            holder = path.read_text("utf-8") or "another process"
            problem = f"the data is still being prepared by {holder} after {waited:.0f} s"
            raise ColotrainError(problem, "wait for that process or end it, then start again")
        report("waiting for another process", int(waited), WAIT_S)
        time.sleep(POLL_S)


def _try(descriptor: int, path: Path) -> bool:
    """Take the lock if it is free; returns whether it was."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        problem = f"{path}: this filesystem has no file locks ({error.strerror})"
        raise ColotrainError(problem, "set COLOTRAIN_CACHE to a folder on one that has") from error
    return True


def _rename(work: Path, entry: Path) -> None:
    """Publish `work`, unless another process has published the same entry meanwhile."""
    try:
        os.rename(work, entry)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
