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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colotrain.data.prepare.corpora import Progress
from colotrain.errors import ColotrainError
from colotrain.rundir import write_atomically

WAIT_S = 1800
POLL_S = 0.05


def cache_folder() -> Path:
    """Return `$COLOTRAIN_CACHE`, else `$XDG_CACHE_HOME/colotrain`, else `~/.cache/colotrain`."""
    if own := os.environ.get("COLOTRAIN_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser().absolute() / "colotrain"


class Cache:
    """Paths of the cache, with look-up, locks and publishing of entries."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path.absolute() if path else cache_folder()

    def entry(self, key: str) -> Path:
        return self.path / "tokens" / key

    def recall(self, fingerprint: str) -> dict[str, Any] | None:
        """Return the answer that `remember` stored for this fingerprint, or None."""
        try:
            found = json.loads(self._index(fingerprint, "json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remember(self, fingerprint: str, answer: dict[str, Any]) -> None:
        write_atomically(self._index(fingerprint, "json"), json.dumps(answer))

    @contextmanager
    def lock(self, fingerprint: str, report: Progress) -> Iterator[None]:
        """Hold the fingerprint's lock, waiting for the process that has it (at most `WAIT_S`).

        The lock is `flock`'s, which is released when its holder dies for any reason.
        """
        path = self._index(fingerprint, "lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            _wait(file.fileno(), path, report)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    @contextmanager
    def publish(self, fingerprint: str, key: str, *, readers: int = 0o044) -> Iterator[Path]:
        """Yield a folder that becomes `entry(key)` when the block ends without an error.

        Other users may read it as far as `readers` (bits of a file's mode) and the umask allow.
        The caller must hold the fingerprint's lock: files of a killed holder are removed first.
        """
        self._sweep()
        work, entry = self.path / "making" / fingerprint, self.entry(key)
        shutil.rmtree(work, ignore_errors=True)
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        of_folder = work.stat().st_mode & (readers | readers >> 2)
        work.chmod(0o700)  # no other user reads it before it is finished
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield work
            for path in (*work.iterdir(), work):
                if path.is_file():
                    path.chmod(0o600 | path.stat().st_mode & readers)
                _sync(path)
            work.chmod(0o700 | of_folder)
            _rename(work, entry)
            _sync(entry.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def discard(self, key: str) -> None:
        """Remove a damaged entry at once, so that no reader sees a part of it."""
        making = self.path / "making"
        making.mkdir(parents=True, exist_ok=True)
        grave = making / f"{key}-{os.getpid()}"
        if self.entry(key).exists():
            os.rename(self.entry(key), grave)
            shutil.rmtree(grave, ignore_errors=True)

    def _index(self, fingerprint: str, ending: str) -> Path:
        return self.path / "index" / f"{fingerprint}.{ending}"

    def _sweep(self) -> None:
        """Remove unfinished folders of dead processes, whose locks are free."""
        for work in (self.path / "making").glob("*"):
            lock = self._index(work.name, "lock")
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
