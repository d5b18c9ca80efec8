"""Looks at colotrain's own models, kept between commands: then no plan waits for torch.

What is kept is a function of this package's files and torch's version, which the key holds; of a
user's model neither is known, and it is looked at each time.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from colotrain.data.cache import cache_folder
from colotrain.errors import ConfigError
from colotrain.plan import ModelPlan
from colotrain.records import from_plain, to_plain
from colotrain.rundir import write_atomically

OWN = "colotrain.models.llm:"
PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (
    "models/llm.py",
    "models/adapters.py",
    "models/loss.py",
    "estimate/tracing.py",
    "estimate/survey.py",
    "engine/blocks.py",
    "engine/grouping.py",
)
MOST_KEPT = 500

T = TypeVar("T")


def kept(cls: type[T], model: ModelPlan, about: tuple[Any, ...], look: Callable[[], T]) -> T:
    """What `look()` returns, or returned earlier for the same model and `about`."""
    if not model.target.startswith(OWN):
        return look()
    known = json.dumps([cls.__name__, to_plain(model), to_plain(about), _version()], sort_keys=True)
    digest = hashlib.sha256(known.encode()).hexdigest()[:32]
    file = cache_folder() / "estimates" / f"{digest}.json"
    try:
        return from_plain(cls, json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, ConfigError):
        pass
    found = look()
    with suppress(OSError):  # a cache that cannot be written is no reason to fail
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(file.parent)
        write_atomically(file, json.dumps(to_plain(found)))
    return found


@functools.cache
def _version() -> str:
    """Of everything that a look depends on beside its arguments."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((PACKAGE / source).read_bytes())
    return f"{metadata.version('torch')} {digest.hexdigest()}"


def _make_room(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for file in files[: max(0, len(files) - MOST_KEPT)]:
        file.unlink(missing_ok=True)
