"""The script that calls the Python API, and the processes that import it.

multiprocessing imports its caller's main module in each process that it starts: a script without a
main guard would do there again what it does. Processes of colotrain import it only for settings
that name what it defines, as `__main__:Net`. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import current_process, spawn
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from colotrain.errors import UsageError

NAMED = "__main__:"
"""How settings name what the script defines."""
IMPORTS = ("init_main_from_name", "init_main_from_path")
"""What multiprocessing tells its processes of the script."""
Script = Mapping[str, str]
"""How to import the script; empty for none."""

_belongs_to_run = False
_replacing = threading.Lock()


def named_by(settings: object) -> Script:
    """Return how to import this process's script if `settings` name what it defines."""
    if NAMED not in repr(settings):
        return {}
    found = spawn.get_preparation_data(current_process().name)
    return {key: found[key] for key in IMPORTS if key in found}


def import_script(script: Script) -> None:
    """Import a script as this process's main module, as multiprocessing would."""
    internals: Any = spawn
    if name := script.get("init_main_from_name"):
        internals._fixup_main_from_name(name)
    if path := script.get("init_main_from_path"):
        internals._fixup_main_from_path(path)


def belong_to_run() -> None:
    """Refuse from now on to start a run from this process, in which the user's code is imported."""
    global _belongs_to_run
    _belongs_to_run = True


def refuse_run_in_import() -> None:
    """Raise `UsageError` in a process that, as it imports the user's code, starts a run again."""
    if _belongs_to_run or getattr(current_process(), "_inheriting", False):
        problem = "processes of a run import this file, which calls colotrain.run again"
        raise UsageError(problem, 'put the call under `if __name__ == "__main__":`')


class Process(ForkServerProcess):
    """Process of the fork server that is not told of the script."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # named by multiprocessing
        internals: Any = ForkServerProcess
        with _without_script(process_obj.name):
            return internals._Popen(process_obj)


class Context(ForkServerContext):
    """Context of the fork server whose processes import no script by themselves."""

    Process = Process


@contextmanager
def _without_script(process: str) -> Iterator[None]:
    """Let a process that is started inside be told of no script; others are, on any thread."""
    with _replacing:
        prepare = spawn.get_preparation_data

        def prepared(name: str) -> dict[str, Any]:
            found: dict[str, Any] = prepare(name)
            left_out = IMPORTS if name == process else ()
            return {key: value for key, value in found.items() if key not in left_out}

        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare
