"""Workers without the wait: a server process imports torch once, and each worker is forked from it.

The server touches no device and starts no threads, so that forking is safe. Each worker watches
its launcher, and ends with it.
"""

from __future__ import annotations

import atexit
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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from colotrain import host
from colotrain.launch.titles import name_process
from colotrain.parent_process import end_with

FIRST, LAST = "colotrain.launch.serving", "colotrain.launch.served"
ENTRY = "colotrain.engine.worker"
LOOK = "colotrain.planner.traced.survey"
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
"""Which torch's functions for meta tensors load."""
PRELOAD = [FIRST, ENTRY, LOOK, LAST]
PRELOAD_TO_LOOK = [FIRST, LOOK, SYMBOLS, LAST]
ENVIRONMENT = {
    # the rendezvous store of a dead attempt must not be reused: restarts hang half of the time
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
TUNABLE = "glibc.malloc.tcache_count"
"""How many freed small pieces of a size a thread keeps: none. The bytes that an aligned tensor
leaves over went to small objects at once, and the holes around them could not merge: up to 10 % of
a rank's memory, and 4 % of a step's time."""


_preloaded: list[str] = []


def is_warm(*, to_launch: bool = False) -> bool:
    """Whether `warm_up` was called in this process, and for a launch."""
    return bool(_preloaded) and not (to_launch and ENTRY not in _preloaded)


def warm_up(*, to_look: bool = False) -> None:
    """Begin to start the server; returns at once. Called early, it hides its imports' time.

    `to_look`: it imports only what looking at a model needs; nothing is to be launched.
    """
    if host.allow_open_files() < host.FEWEST_OPEN_FILES:
        return  # which the verb refuses
    _preloaded[:] = _preloaded or (PRELOAD_TO_LOOK if to_look else PRELOAD)
    os.environ.update(environment())  # before torch is imported here or there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    with _group_signals_ignored():
        resource_tracker.ensure_running()
    threading.Thread(target=forkserver.ensure_running, daemon=True).start()
    if to_look:
        atexit.register(_end_server)


def _end_server() -> None:
    """Do not let who reads this process's output wait until the server has imported everything."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def import_agent() -> None:
    """Import torch's elastic agent, which launching needs: where one has to wait anyway."""
    import_quickly("torch.distributed.elastic.agent.server.local_elastic_agent")


def import_quickly(module: str) -> None:
    """Import what makes many objects that stay, without looking for garbage among them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()


def environment() -> dict[str, str]:
    """What a process that trains needs in its environment; what the user has chosen stays."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if TUNABLE not in tunables:
        tunables = f"{tunables}:{TUNABLE}=0".lstrip(":")
    return ENVIRONMENT | {"GLIBC_TUNABLES": tunables}


@contextmanager
def _group_signals_ignored() -> Iterator[None]:
    """What is started meanwhile outlives signals to the whole group; ignoring them is inherited."""
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
    """What workers hand their results over in: nothing, see `work`."""

    def empty(self) -> bool:
        return True


class Context(ForkServerContext):
    """Without the queues and events that torch makes for every worker.

    Their semaphores have names in /dev/shm, which stay when everything is killed at once.
    """

    def SimpleQueue(self) -> Any:  # as multiprocessing calls it
        return Nothing()

    def Event(self) -> Any:
        return Nothing()


@contextmanager
def without_results() -> Iterator[None]:
    """Workers that torch starts meanwhile have no means to hand over a result."""
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    before = contexts["forkserver"]
    contexts["forkserver"] = Context()
    try:
        yield
    finally:
        contexts["forkserver"] = before


def work(module: str, rundir: str, launcher: int) -> None:
    """Body of a worker process: `module.main(rundir)`, whose result is the exit code.

    An exception is printed to the worker's log. `launcher` is a process id.

    It never returns: torch's agent would take the result over a queue, with locks that a worker
    killed just then holds for ever. Nor are there destructors: those of a broken process group may
    wait for its peers.
    """
    end_with(launcher)
    name_process(f"colotrain: {Path(rundir).name} rank {os.environ.get('RANK', '?')}")
    try:
        code = importlib.import_module(module).main(rundir)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
