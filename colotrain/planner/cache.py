"""Cache of surveys and traces of models, so that plans need not load torch again.

The key contains the arguments, this package's code, torch's version and the state of all installed
packages. The user's files that a result depends on are stored with it, and checked before its use.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from colotrain import cache_folder
from colotrain.errors import ConfigError
from colotrain.planner.dependencies import Dependencies, installation
from colotrain.records import from_plain, to_plain
from colotrain.spec.plan import ModelPlan
from colotrain.user_modules import PACKAGE

SURVEY_MODULE = "colotrain.planner.traced.survey"
MOST_KEPT = 500

T = TypeVar("T")


def cached(
    cls: type[T],
    model: ModelPlan,
    about: tuple[Any, ...],
    compute: Callable[[], tuple[T, Dependencies | None]],
    *,
    runs_users_code: bool = True,
) -> T:
    """The result of `compute()`, or an earlier one if nothing that it depended on has changed.

    `compute` returns the result and its dependencies; with None the result is not cached. Where it
    runs no code of the user's there are none, and the result is that of every folder.
    """
    modules = (SURVEY_MODULE, model.target.partition(":")[0])
    where = os.getcwd() if runs_users_code else ""
    known = [cls.__name__, to_plain(model), to_plain(about), where, *_version(modules)]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        document = cache_folder.read("estimates", f"{digest}.json")
        if from_plain(Dependencies, document["dependencies"]).are_unchanged():
            return from_plain(cls, document["found"])
    found, dependencies = compute()
    if not runs_users_code:
        dependencies = Dependencies()
    if dependencies is not None:
        document = {"dependencies": to_plain(dependencies), "found": to_plain(found)}
        cache_folder.write("estimates", f"{digest}.json", json.dumps(document))
        with suppress(OSError):
            _make_room(cache_folder.subfolder("estimates", make=False))
    return found


@functools.cache
def _version(modules: tuple[str, ...]) -> list[Any]:
    """Versions of torch and Python, of these modules' source, and of installed packages."""
    digest = hashlib.sha256()
    for _, text in sorted(sources(*modules).items()):
        digest.update(text)
    return [metadata.version("torch"), sys.version, digest.hexdigest(), installation()]


IMPORT = re.compile(rb"^ *(?:from|import) +(colotrain[\w.]*)(?: +import +(\([^)]*\)|.*))?", re.M)


def sources(*modules: str) -> dict[str, bytes]:
    """Name → source of `modules` and of what they import of this package, without importing it."""
    found: dict[str, bytes] = {}
    wanted = set(modules)
    while wanted:
        name = wanted.pop()
        text = None if name in found else _source(name)
        if text is None:
            continue
        found[name] = text
        wanted.add(name.rpartition(".")[0])  # the package is imported before its module
        for imported, names in IMPORT.findall(text):
            inside = (f"{imported.decode()}.{each.decode()}" for each in re.findall(rb"\w+", names))
            wanted |= {imported.decode(), *inside}
    return found


def _source(module: str) -> bytes | None:
    package, *inner = module.split(".")
    path = Path(PACKAGE, *inner)
    for file in (path.with_suffix(".py"), path / "__init__.py") if package == "colotrain" else ():
        with suppress(OSError):
            return file.read_bytes()
    return None


def _make_room(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for file in files[: max(0, len(files) - MOST_KEPT)]:
        file.unlink(missing_ok=True)
