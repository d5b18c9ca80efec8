"""Dependencies of a survey of a user's model: source files, other files, environment variables.

Everything that the user's code imports, opens, lists or reads from the environment is recorded
while it runs. If all of it is unchanged, the survey would give the same result. Installed packages
are covered by the modification times of their folders. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import source_from_cache
from pathlib import Path
from types import FrameType
from typing import Any

from colotrain.current_folder import places_of_code
from colotrain.dotted import import_target
from colotrain.forked import in_fork
from colotrain.spec.plan import OWN_MODELS, ModelPlan
from colotrain.user_modules import installed, is_below, is_users, python

SYSTEM = ("/proc", "/sys", "/dev")
MOST_NOTED = 2000
"""Most files, folders and variables; a result that depends on more is not cached."""
ABSENT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Files and variables that must be unchanged for a cached result to hold."""

    modules: dict[str, str] = field(default_factory=dict)
    """Name → file of the user's own modules."""
    files: dict[str, str] = field(default_factory=dict)
    """Path → digest of its content (sources) or its size and time (others)."""
    folders: dict[str, str] = field(default_factory=dict)
    """Path → digest of the folder's file names."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variable → digest of its value."""

    def __len__(self) -> int:
        return sum(map(len, (self.modules, self.files, self.folders, self.variables)))

    def are_unchanged(self) -> bool:
        return (
            all(_value(os.environ.get(name)) == known for name, known in self.variables.items())
            and all(_file(path) == known for path, known in self.files.items())
            and all(_folder(path) == known for path, known in self.folders.items())
            and all(self._is_found(name, file) for name, file in self.modules.items())
        )

    def _is_found(self, name: str, file: str) -> bool:
        """Whether `import name` would still load `file`, and no other module of that name."""
        parent = name.rpartition(".")[0]
        if parent and parent not in self.modules:  # the parent's folder is not known
            return True
        inside = (
            [str(Path(self.modules[parent]).parent)] if parent else [*places_of_code(), *sys.path]
        )
        spec = PathFinder.find_spec(name, inside)
        return spec is not None and spec.origin == file


def record_dependencies(function: str, *args: Any) -> tuple[Any, Dependencies | None]:
    """The result of `package.module:function`, and its dependencies.

    The dependencies are None where they are unknown: the user's module was loaded before, from a
    file that may have changed since.
    """
    loaded_before = _loaded_before()
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with _noted() as notes:
        result = call(*args)
    if set(_own_modules()) & loaded_before:
        return result, None
    found = notes.dependencies()
    return result, found if len(found) <= MOST_NOTED else None


def record_trial(function: str, model: ModelPlan, *args: Any) -> tuple[Any, Dependencies | None]:
    """`record_dependencies` of a function that runs the model without values, in a fork.

    What the user's code keeps of such values ends there. Its module is imported before, once.
    """
    if model.hf or model.target in OWN_MODELS:  # nothing of theirs is kept
        return record_dependencies(function, model, *args)
    _loaded_before()
    with _noted() as notes, suppress(Exception):  # the fork raises it, too
        import_target("model.target", model.target)
    _imports.append(notes)
    return in_fork(functools.partial(record_dependencies, function, model, *args))


def installation() -> list[tuple[str, int]]:
    """Folders that packages are installed in, each with its modification time in ns."""
    return [(path, os.stat(path).st_mtime_ns) for path in installed() if os.path.isdir(path)]


@functools.cache
def _loaded_before() -> frozenset[str]:
    """The user's modules that were loaded before the first call of `record_dependencies`."""
    return frozenset(_own_modules())


class _Notes:
    def __init__(self) -> None:
        self.opened: set[str] = {path for notes in _imports for path in notes.opened}
        self.listed: set[str] = {path for notes in _imports for path in notes.listed}
        self.asked: set[str] = {name for notes in _imports for name in notes.asked}
        self.environment = dict(os.environ)  # before libraries change it

    def dependencies(self) -> Dependencies:
        modules = _own_modules()
        files = {*modules.values(), *(path for path in self.opened if _is_own(path))}
        return Dependencies(
            modules=modules,
            files={path: _file(path) for path in sorted(files)},
            folders={path: _folder(path) for path in sorted(filter(_is_own, self.listed))},
            variables={name: _value(self.environment.get(name)) for name in sorted(self.asked)},
        )


_imports: list[_Notes] = []
"""What the user's modules depended on when `record_trial` imported them."""
_notes: list[_Notes] = []
"""Stack of recorders; events go to the last."""


@contextmanager
def _noted() -> Iterator[_Notes]:
    _listen()
    notes, ask = _Notes(), os._Environ.__getitem__

    def asked(environment: Any, name: Any) -> Any:
        if isinstance(name, str) and _asks_for_itself():
            notes.asked.add(name)
        return ask(environment, name)

    _notes.append(notes)
    os._Environ.__getitem__ = asked  # type: ignore[method-assign]
    try:
        yield notes
    finally:
        os._Environ.__getitem__ = ask  # type: ignore[method-assign]
        _notes.remove(notes)


@functools.cache
def _listen() -> None:
    """Install the audit hook, once: it cannot be removed."""
    sys.addaudithook(_on_event)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if not _notes:
        return
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path, writes = os.fsdecode(args[0]), os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if not args[2] & writes:
            _notes[-1].opened.add(os.path.abspath(_source_of(path)))
    elif event in ("os.listdir", "os.scandir") and not _is_of_import():
        path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else "."
        _notes[-1].listed.add(os.path.abspath(path))


def _source_of(path: str) -> str:
    try:
        return source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:
        return path


def _is_of_import() -> bool:
    """Whether it is Python's import system that lists a folder."""
    return sys._getframe(2).f_code.co_filename.startswith("<frozen importlib")


def _asks_for_itself() -> bool:
    """Whether the user's own code reads a variable, not a library that it uses."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _is_own(frame.f_code.co_filename)


def _own_modules() -> dict[str, str]:
    """Name → file of the loaded modules that are neither installed nor Python's own."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and _is_own(file) and name not in ("__main__", "__mp_main__"):
            found[name] = file
    return found


def _is_own(path: str) -> bool:
    return is_users(path) and not is_below(path, SYSTEM)


def _is_pythons(file: str) -> bool:
    return file.startswith("<frozen") or is_below(file, python())


def _file(path: str) -> str:
    """Digest of a source file; size and modification time of others, which may be large."""
    try:
        if path.endswith(".py"):
            return _digest(Path(path).read_bytes())
        found = os.stat(path)
    except OSError:
        return ABSENT
    return f"{found.st_size} {found.st_mtime_ns}"


def _folder(path: str) -> str:
    try:
        return _digest("\0".join(sorted(os.listdir(path))).encode("utf-8", "surrogateescape"))
    except OSError:
        return ABSENT


def _value(value: str | None) -> str:
    return ABSENT if value is None else _digest(value.encode("utf-8", "surrogateescape"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
