"""Dotted paths of the user's code, `package.module:callable`. Standard library only."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from colotrain.errors import ConfigError, Problem, message_of, suggest

FORM = "`package.module:callable`"
PACKAGE = str(Path(__file__).resolve().parent)


def import_target(key: str, dotted: str) -> Any:
    """Import the callable that `dotted` names; `key` is the setting that contains it.

    Modules are found as by `python -m`: in the current folder first. Any error in the path, and any
    exception while its module is imported, is a `ConfigError`.
    """
    module_name, colon, attributes = dotted.partition(":")
    names = [*module_name.split("."), *attributes.split(".")]
    if not colon or not all(name.isidentifier() for name in names):
        raise _wrong(key, dotted, FORM, _form_hint(dotted))
    found: Any = _import(key, dotted, module_name)
    for name in attributes.split("."):
        if not hasattr(found, name):
            where = getattr(found, "__name__", module_name)
            public = (known for known in dir(found) if not known.startswith("_"))
            raise _wrong(key, dotted, f"a name that {where} has", suggest(name, public))
        found = getattr(found, name)
    if not callable(found):
        raise _wrong(key, dotted, f"a callable, not {type(found).__name__}", "name a function")
    return found


def _import(key: str, dotted: str, module_name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be newer than the folder listing Python keeps
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(key, dotted, module_name, error) from error
        raise _missing(key, dotted, error.name) from error
    except Exception as error:
        raise _broken(key, dotted, module_name, error) from error


def described(error: BaseException) -> str:
    """Describe an error and its line in the user's code: `KeyError: 'x' (model.py:12)`."""
    line = users_line(error)
    return f"{type(error).__name__}: {message_of(error)}{f' ({line})' if line else ''}"


def users_line(error: BaseException) -> str:
    """Return the user's innermost line that raised, as `model.py:12`; empty without one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def is_users(path: str) -> bool:
    """Whether a source file is the user's: not Python's, installed, or this package's."""
    return not path.startswith("<") and not is_below(path, (PACKAGE, *python(), *installed()))


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{os.sep}") for folder in folders)


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


def shown_path(path: str) -> str:
    """Return a source file's path as messages show it: below the current folder without that."""
    with suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _missing(key: str, dotted: str, module_name: str) -> ConfigError:
    here = Path.cwd()
    hint = suggest(module_name, (entry.stem for entry in here.glob("*.py")))
    fix = f"run where {module_name.split('.')[0]} can be imported (now in {here})"
    if hint.startswith("did you mean"):
        fix = f"{hint} or {fix}"
    return _wrong(key, dotted, f"a module that can be found ({module_name} cannot)", fix)


def _broken(key: str, dotted: str, module_name: str, error: Exception) -> ConfigError:
    expected = f"a module that imports (it raised {described(error)})"
    return _wrong(key, dotted, expected, f'make `python -c "import {module_name}"` work')


def _form_hint(dotted: str) -> str:
    module_name, _, name = dotted.rpartition(".")
    if ":" not in dotted and module_name:
        return f"did you mean {module_name}:{name}?"
    return "write the module, a colon, and the name of the function in it"


def _wrong(key: str, dotted: str, expected: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=dotted, expected=expected, fix=fix)])
