"""Fork server: imports torch once, and every worker is forked from it and starts without a wait.

The server touches no device and starts no threads, so forking it is safe. Each worker watches its
launcher and the server, and exits when one of them does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from colotrain import callers_script, host
from colotrain.callers_script import Script, belong_to_run, import_script
from colotrain.dotted import new_python
from colotrain.errors import UsageError
from colotrain.parent_process import die_with, send, stat_of
from colotrain.spec.elastic import COPY_PLACES, ROUND_KEY
from colotrain.spec.exit_codes import WORKER_USAGE, signal_name

FIRST, LAST = "colotrain.launch.server.forkserver_first", "colotrain.launch.server.forkserver_last"
ENTRY = "colotrain.engine.worker"
SURVEY = "colotrain.planner.traced.survey"
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
"""Module that torch's functions for meta tensors import."""
USED_LATER = [
    "numpy.random",
    "torch._functorch.config",
    "torch.profiler._cupti_monitor",
    "torch.utils._device",
]
"""Modules that libraries import when a rank first needs them: 30 ms of each rank's start."""
PRELOAD = [FIRST, ENTRY, SURVEY, *USED_LATER, LAST]
PRELOAD_TO_PLAN = [FIRST, SURVEY, SYMBOLS, LAST]
ENVIRONMENT = {
    # reusing a dead attempt's rendezvous store makes about half of all restarts hang
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
OF_CUDA = {
    # segments that grow: what was freed in one size serves another
    "PYTORCH_ALLOC_CONF": ("expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"),
    # the last collectives of each rank, written down when NCCL's watchdog ends a rank
    "TORCH_FR_BUFFER_SIZE": ("2000", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1",),
}
"""Settings that torch reads where it uses CUDA: name → value, other spellings."""
SILENT_TRACKER = ("-W", "ignore:resource_tracker")
"""Options of multiprocessing's resource tracker, which removes the semaphores of processes that
were killed or left without destructors, as ranks are, and would warn of each."""
TUNABLE = "glibc.malloc.tcache_count"
"""glibc setting, set to 0: number of freed small blocks per size that a thread caches. With the
cache, small objects took the bytes left over beside aligned tensors, so that free blocks around
them could not merge: this cost up to 10 % of a rank's memory and 4 % of a step's time."""


_preloaded: list[str] = []
_environment: dict[str, str] = {}
"""Of this process when it started the server."""


def is_warm(*, to_launch: bool = False) -> bool:
    """Whether `warm_up` was called in this process; with `to_launch`, for a launch."""
    return bool(_preloaded) and not (to_launch and ENTRY not in _preloaded)


def warm_up(*, to_plan: bool = False) -> None:
    """Start the server in the background. Called early, it hides the time of its imports.

    With `to_plan`, the server imports only what examining a model needs; nothing will be launched.
    """
    if host.allow_open_files() < host.FEWEST_OPEN_FILES:
        return  # the command reports this error
    _preloaded[:] = _preloaded or (PRELOAD_TO_PLAN if to_plan else PRELOAD)
    os.environ.update(environment())  # before torch is imported here or there
    if not _environment:
        _environment.update(os.environ)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    with _group_signals_ignored(), _python_options(*SILENT_TRACKER):
        resource_tracker.ensure_running()
    threading.Thread(target=_ensure_running, daemon=True).start()
    atexit.register(end_server)


def end_unfit_server() -> None:
    """End a server from which workers would start slowly or with old environment variables.

    It has imported only what planning needs, or variables of this process have changed since.
    """
    is_current = _environment == os.environ | environment()
    if not _preloaded or (is_warm(to_launch=True) and is_current):
        return
    end_server()
    if pid := _server_pid():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing reaps it
    _preloaded.clear()
    _environment.clear()


def _ensure_running() -> None:
    """Start the server; what forbids it is said where the server is needed."""
    with suppress(OSError), _python_options():
        forkserver.ensure_running()


def end_server() -> None:
    """Kill the server, so that a reader of this process's output need not wait for its imports."""
    if pid := _server_pid():
        send(signal.SIGKILL, pid)


def _server_pid() -> int | None:
    found: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return found


def how_server_ended() -> str:
    """Return how the server ended, for example `was killed by SIGKILL`; empty while it runs."""
    pid = _server_pid()
    if not pid:
        return ""
    try:  # without reaping it: multiprocessing does, when it starts another
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if found is None:
        return ""
    if found.si_code == os.CLD_EXITED:
        return f"ended with exit code {found.si_status}"
    return f"was killed by {signal_name(found.si_status)}"


def import_agent() -> None:
    """Import torch's elastic agent; called where the launcher has to wait anyway."""
    import_quickly("torch.distributed.elastic.agent.server.local_elastic_agent")


def import_quickly(module: str) -> None:
    """Import a module with garbage collection off: it creates many objects, all of which stay."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()


def environment() -> dict[str, str]:
    """Return the environment variables of a training process; the user's own settings are kept."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if TUNABLE not in tunables:
        tunables = f"{tunables}:{TUNABLE}=0".lstrip(":")
    chosen = ENVIRONMENT | {"GLIBC_TUNABLES": tunables}
    for name, (value, *spellings) in OF_CUDA.items():
        if not any(spelling in os.environ for spelling in (name, *spellings)):
            chosen[name] = value
    return chosen


@contextmanager
def _python_options(*more: str) -> Iterator[None]:
    """Let multiprocessing start its processes, which are `python -c`, as `new_python` does.

    They get `more` options of Python.
    """
    internals: Any = util
    ask = internals._args_from_interpreter_flags
    internals._args_from_interpreter_flags = lambda: [*new_python()[1:], *more, *ask()]
    try:
        yield
    finally:
        internals._args_from_interpreter_flags = ask


@contextmanager
def _group_signals_ignored() -> Iterator[None]:
    """Ignore SIGUSR1 and SIGHUP in processes started meanwhile: child processes inherit this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Nothing:
    """Stands in for the queues and events through which workers return results; see `work`."""

    def empty(self) -> bool:
        return True


class Context(callers_script.Context):
    """Fork server context without the queues and events that torch creates per worker.

    Their semaphores have names in /dev/shm, which would remain if all processes were killed at
    once.
    """

    def SimpleQueue(self) -> Any:  # named by multiprocessing
        return Nothing()

    def Event(self) -> Any:
        return Nothing()


@contextmanager
def without_results() -> Iterator[None]:
    """Let torch start workers without the queues through which they would return results."""
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    before = contexts["forkserver"]
    contexts["forkserver"] = Context()
    try:
        yield
    finally:
        contexts["forkserver"] = before


def work(
    module: str,
    rundir: str,
    launcher: int,
    places: str,
    key: str,
    digests: tuple[str, ...],
    script: Script,
) -> None:
    """Body of a worker process: `module.main(rundir, *digests)`, whose result is the exit code.

    An exception is printed to the worker's log. `launcher` is the launcher's process id, `places`
    are its `CopyPlaces`, as JSON, if it keeps copies, `key` is the secret of the round, `digests`
    are those of the plans that the worker reads, and `script` is what it imports first.

    It exits without returning: torch's agent would receive the result over a queue, whose locks a
    worker that is killed at that moment never releases. Destructors are skipped too: those of a
    broken process group may wait for its peers.
    """
    die_with(launcher)
    die_with(os.getppid())  # without the server, nobody learns how this process ends
    os.environ[ROUND_KEY] = key
    if places:
        os.environ[COPY_PLACES] = places
    name_process(f"colotrain: {Path(rundir).name} rank {os.environ.get('RANK', '?')}")
    belong_to_run()
    try:
        import_script(script)
        code = importlib.import_module(module).main(rundir, *digests)
    except UsageError as error:
        sys.stderr.write("\n".join(error.lines()) + "\n")
        code = WORKER_USAGE
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


ARG_START, ARG_END = 45, 46
"""Indices in /proc/self/stat after the process name: fields 48 and 49 in proc(5)."""


def name_process(title: str) -> None:
    """Replace this process's command line with `title`; only Linux supports this.

    The title is cut to the command line's length, which is large in processes forked from a server.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_text(title[:15])
        fields = stat_of("self")
        start, room = int(fields[ARG_START]), int(fields[ARG_END]) - int(fields[ARG_START])
        if start and room > 1:
            text = title.encode("ascii", "replace")[: room - 1]
            ctypes.memmove(start, text.ljust(room, b"\0"), room)
