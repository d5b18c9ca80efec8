"""Identity of prepared data: the same wherever files are, another once their content changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from colotrain.data.prepare.prepared import Prepared
from colotrain.data.prepare.tokens import prepare_all
from colotrain.spec.plan import DataPlan

PIECES, PIECE_BYTES = 256, 1 << 12


def identities(plan: DataPlan) -> list[str]:
    """The identity of each shard of data that is prepared already."""
    return [_identity(shard) for shard in prepare_all(plan)]


def identity_of(shards: Iterable[Prepared]) -> str:
    """One identity of all shards, short enough to be part of every copy in memory."""
    found = [_identity(shard) for shard in shards]
    return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()


def _identity(shard: Prepared) -> str:
    """Name of the cache's entry, a hash of its content; of token files used in place a hash of
    their sizes and of pieces spread over them."""
    if _is_entry(shard):
        return shard.train.parent.name
    digest = hashlib.sha256()
    for path in dict.fromkeys((shard.train, shard.validation)):
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def _is_entry(shard: Prepared) -> bool:
    return (shard.train.parent / "prepared.json").is_file()


def files_in_place(shards: Iterable[Prepared]) -> dict[Path, str]:
    """Token files that training reads where they are → their versions (`versions_of`).

    Of other data training reads the cache's entries, which do not change.
    """
    others = [shard for shard in shards if not _is_entry(shard)]
    return versions_of(path for s in others for path in (s.train, s.validation))


def versions_of(paths: Iterable[Path]) -> dict[Path, str]:
    """Size and time of the last change of each file; empty for one that is not there."""
    found = {}
    for path in paths:
        try:
            about = path.stat()
            found[path] = f"{about.st_size} {about.st_mtime_ns}"
        except OSError:
            found[path] = ""
    return found


def _pieces(path: Path) -> Iterator[bytes]:
    """The size of a file as text, and pieces spread evenly over it."""
    size = path.stat().st_size
    yield f"{size}\n".encode()
    with path.open("rb") as file:
        for number in range(PIECES):
            file.seek(number * max(0, size - PIECE_BYTES) // (PIECES - 1))
            yield file.read(PIECE_BYTES)
