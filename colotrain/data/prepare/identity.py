"""Identity of a plan's data: the same wherever files are, another once their content changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from colotrain.data.prepare.prepared import Prepared
from colotrain.data.prepare.tokens import prepare_all
from colotrain.spec.plan import DataPlan

PIECES, PIECE_BYTES = 256, 1 << 12


def identities(plan: DataPlan) -> list[str]:
    """The identity of each shard of data that is prepared already."""
    return [_identity(shard) for shard in prepare_all(plan)]


def _identity(shard: Prepared) -> str:
    """Name of the cache's entry, a hash of its content; of token files used in place a hash of
    their sizes and of pieces spread over them."""
    if (shard.train.parent / "prepared.json").is_file():
        return shard.train.parent.name
    digest = hashlib.sha256()
    for path in dict.fromkeys((shard.train, shard.validation)):
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """The size of a file as text, and pieces spread evenly over it."""
    size = path.stat().st_size
    yield f"{size}\n".encode()
    with path.open("rb") as file:
        for number in range(PIECES):
            file.seek(number * max(0, size - PIECE_BYTES) // (PIECES - 1))
            yield file.read(PIECE_BYTES)
