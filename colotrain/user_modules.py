"""The user's own modules: which they are, and who may import them from the current folder.

A folder in `sys.path` serves everybody: a library that tries to import something that is not
installed would run a file of that name. So the user's code alone finds modules in the current
folder, and after all other places. Standard library only.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import spawn
from os import sep
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parent)
FOR_OTHERS = {
    "colotrain.dotted",
    "colotrain.export.receipt",
    "torch.serialization",
    "torch._dynamo.guards",
    "torch._dynamo.symbolic_convert",
    "hydra._internal.utils",
    "numpy.lib._format_impl",
    "numpy.lib.format",
    "cloudpickle.cloudpickle",
    "dill._dill",
    "joblib.numpy_pickle",
}
"""Modules that import what the user's code, or a file that it reads, names."""


class Finder(MetaPathFinder):
    """Finds modules in a folder for the user's code, and for what imports on its behalf."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_first = path is None and name not in sys.stdlib_module_names
        if is_first and may_import(sys._getframe(1)):
            return PathFinder.find_spec(name, [self.folder], target)
        return None


def may_import(frame: FrameType | None) -> bool:
    """Whether whoever runs in `frame` may import from the current folder.

    Python's own modules import for those that call them; where there are only such, a process
    of the user's begins.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        is_pythons = file.startswith("<") or is_below(file, python())
        if not is_pythons or is_below(file, installed()):
            return is_users(file) or frame.f_globals.get("__name__") in FOR_OTHERS
        frame = frame.f_back
    return True


def install(*folders: str) -> None:
    """Let the user's code find modules in these folders, and in processes that it starts."""
    for folder in folders:
        if folder not in _folders():
            sys.meta_path.append(Finder(folder))
    spawn.get_preparation_data = _preparation_data


_of_python = spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """Add the folders to what a new process gets; it unpickles that before all else."""
    return {**_of_python(name), "user_modules": _Folders()}


class _Folders:
    def __reduce__(self) -> tuple[Any, ...]:
        return install, tuple(_folders())


def _folders() -> list[str]:
    return [finder.folder for finder in sys.meta_path if isinstance(finder, Finder)]


def is_users(path: str) -> bool:
    """Whether a source file is the user's: not Python's, installed, or this package's."""
    return not path.startswith("<") and not is_below(path, (PACKAGE, *python(), *installed()))


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{sep}") for folder in folders)


@functools.cache
def python() -> tuple[str, ...]:
    """Return the folders of Python's own modules."""
    return (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the folders of installed packages."""
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    named = {p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")}
    return tuple(sorted(paths | named))
