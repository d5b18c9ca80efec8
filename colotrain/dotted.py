"""Dotted paths of the user's code, `package.module:callable`. Standard library only."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from colotrain.current_folder import holder_of
from colotrain.errors import ColotrainError, ConfigError, Problem, message_of, suggest
from colotrain.user_modules import install, is_users

FORM = "`package.module:callable`"


def import_target(key: str, dotted: str) -> Any:
    """Import the callable that `dotted` names; `key` is the setting that contains it.

    The module is looked up in the current folder first; what it imports, there last, so that no
    file there takes the place of Python's and installed modules (`user_modules`). A run's or a
    model's directory is no place for modules. Any error in the path, and any
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
    folder, package = os.getcwd(), module_name.partition(".")[0]
    is_for_code = not holder_of(Path(folder))
    if is_for_code:
        install(folder)
    importlib.invalidate_caches()  # the file may be newer than the folder listing Python keeps
    try:
        if is_for_code and package not in {*sys.modules, *sys.stdlib_module_names}:
            _load_from(folder, package)
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(key, dotted, module_name, error) from error
        raise _missing(key, dotted, error.name) from error
    except Exception as error:
        raise _broken(key, dotted, module_name, error) from error


def _load_from(folder: str, name: str) -> None:
    """Import a module or package that is in `folder`, whatever else has its name."""
    spec = PathFinder.find_spec(name, [folder])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def new_python() -> list[str]:
    """Return the command of another Python, which imports from the current folder if this one does.

    `python -m` and `python -c` do, before all else; the command `colotrain` does not.
    """
    first = sys.path[0]
    does = not first or (os.path.exists(first) and os.path.samefile(first, "."))
    return [sys.executable] if does else [sys.executable, "-P"]


def described(error: BaseException) -> str:
    """Describe an error and its line in the user's code: `KeyError: 'x' (model.py:12)`.

    A `ColotrainError`, which says what to do, is described without the name of its class.
    """
    line, own = users_line(error), isinstance(error, ColotrainError)
    kind = "" if own else f"{type(error).__name__}: "
    return f"{kind}{message_of(error)}{f' ({line})' if line else ''}"


def users_line(error: BaseException) -> str:
    """Return the user's innermost line that raised, as `model.py:12`; empty without one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def shown_path(path: str) -> str:
    """Return a source file's path as messages show it: below the current folder without that."""
    with suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _missing(key: str, dotted: str, module_name: str) -> ConfigError:
    here = Path.cwd()
    hint = suggest(module_name, (entry.stem for entry in here.glob("*.py")))
    where = holder_of(here)
    why = f"now in {here}" if not where else f"{where}: no modules are taken from there"
    fix = f"run where {module_name.split('.')[0]} can be imported ({why})"
    if hint.startswith("did you mean"):
        fix = f"{hint} or {fix}"
    return _wrong(key, dotted, f"a module that can be found ({module_name} cannot)", fix)


def _broken(key: str, dotted: str, module_name: str, error: Exception) -> ConfigError:
    expected = f"a module that imports (it raised {described(error)})"
    fix = f'make `python -c "import {module_name}"` work'
    if isinstance(error, ColotrainError):  # colotrain's, called as the module is imported
        where = f", {line}" if (line := users_line(error)) else ""
        expected = f"a module that imports (it raised: {error.problem}{where})"
        fix = error.fix or fix
    return _wrong(key, dotted, expected, fix)


def _form_hint(dotted: str) -> str:
    module_name, _, name = dotted.rpartition(".")
    if ":" not in dotted and module_name:
        return f"did you mean {module_name}:{name}?"
    return "write the module, a colon, and the name of the function in it"


def _wrong(key: str, dotted: str, expected: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=dotted, expected=expected, fix=fix)])
