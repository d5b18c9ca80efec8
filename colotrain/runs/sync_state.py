"""Which files of a run are in its object store as they are here, so that none is copied twice."""

from __future__ import annotations

import json
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from colotrain import signatures
from colotrain.engine.state.manifest import MANIFEST
from colotrain.errors import ConfigError
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir, read_json
from colotrain.runs.store import Stored

SMALL = (
    "plan*.json",
    "config.yaml",
    "signature.json",
    "precomputed/reference*/*.safetensors",
    "launcher.json",
    "summary.json",
    "samples.jsonl",
    "events/*.jsonl",
    "logs/*.log",
)
"""Files that are in the store beside the checkpoints, as globs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file that is the same here and in the store."""

    token: str
    """`Stored.token` of the object."""
    version: str
    """Version of the local file, from `version_of`, or its checksum."""
    bytes: int
    """Size of the object."""


@dataclass(slots=True, kw_only=True)
class _Record:
    """Content of `RunDir.store_file`."""

    address: str
    entries: dict[str, Entry] = field(default_factory=dict)
    error: str = ""
    signature: str = ""
    """Signature of the rest: whatever is named here may be deleted from the store."""


class SyncState:
    """What was last sent or fetched under each name, kept in the run's folder; thread-safe."""

    def __init__(self, rundir: RunDir, address: str) -> None:
        self._rundir, self._file = rundir, rundir.store_file
        self._lock, self._own = threading.Lock(), set[str]()
        self._now = _Record(address=address)
        self._signs = _has_key()
        try:
            found = from_plain(_Record, read_json(self._file, rundir.open))
        except (OSError, ValueError, RecursionError, ConfigError):
            return
        signature, found.signature = found.signature, ""
        is_signed = signatures.is_signature(signature, "store", to_plain(found))
        if found.address == address and (is_signed or not self._signs):
            self._now = found
            self._own |= set(found.entries if is_signed else ())

    @property
    def error(self) -> str:
        """The last error of sending, if nothing was sent since; else empty."""
        return self._now.error

    def get(self, name: str) -> Entry | None:
        return self._now.entries.get(name)

    def begin(self, names: Iterable[str]) -> None:
        """Record names that are written from here on, so that a torn upload can be deleted."""
        with self._lock:
            begun = {name: Entry(token="", version="", bytes=0) for name in names}
            self._now.entries |= begun
            self._own |= set(begun)
            self._save()

    def set(self, name: str, stored: Stored, version: str) -> None:
        entry = Entry(token=stored.token, version=version, bytes=stored.bytes)
        with self._lock:
            self._now.entries[name] = entry
            self._own.add(name)
            self._now.error = ""
            self._save()

    def drop(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._now.entries.pop(name, None)
            self._save()

    def fail(self, error: str) -> None:
        with self._lock:
            self._now.error = error
            self._save()

    def has(self, name: str, version: str) -> bool:
        """Whether this version of a file was sent or fetched."""
        entry = self.get(name)
        return entry is not None and entry.version == version

    def is_current(self, name: str, stored: Stored | None) -> bool:
        """Whether the object is the one that was last sent or fetched."""
        entry = self.get(name)
        return entry is not None and stored is not None and entry.token == stored.token

    def is_own(self, name: str, stored: Stored | None) -> bool:
        """Whether the object is one that was sent from here, or is here as it is there."""
        entry = self.get(name)
        if entry is None or name not in self._own:
            return False
        return not entry.token or (stored is not None and entry.token == stored.token)

    def begun(self) -> list[str]:
        """Return the names whose writing has begun and did not end."""
        return [name for name, entry in self._now.entries.items() if not entry.version]

    def _save(self) -> None:
        plain = to_plain(self._now)
        if self._signs:
            plain |= {"signature": signatures.signature("store", plain)}
        self._rundir.write(self._file, json.dumps(plain))


def _has_key() -> bool:
    """Whether records can be signed; else no other process deletes what they name."""
    try:
        return bool(signatures.signature("store", {}))
    except OSError:
        return False


def version_of(file: Path) -> str:
    """Return size and time of the last change; raises `OSError` if there is no such file."""
    about = file.lstat()
    return f"{about.st_size}-{about.st_mtime_ns}"


def version_of_content(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def small_files(rundir: RunDir) -> Iterator[str]:
    """Yield the names of the local files that belong in the store, without checkpoints."""
    for glob in SMALL:
        for file in sorted(rundir.path.glob(glob)):
            if is_plain(rundir, file):
                yield file.relative_to(rundir.path).as_posix()


def is_plain(rundir: RunDir, file: Path) -> bool:
    """Whether this is a regular file of the run's own folder, reached through no link in it."""
    try:
        if ".." in file.parts:
            return False
        folders = file.relative_to(rundir.path).parents
        modes = [(rundir.path / folder).lstat().st_mode for folder in [*folders][:-1]]
        return stat.S_ISREG(file.lstat().st_mode) and all(map(stat.S_ISDIR, modes))
    except (OSError, ValueError):
        return False


def committed(stored: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints whose manifest is in the store, newest first."""
    found = (re.fullmatch(rf"checkpoints/(step-\d{{8,}})/{MANIFEST}", name) for name in stored)
    return sorted((match[1] for match in found if match), reverse=True)
