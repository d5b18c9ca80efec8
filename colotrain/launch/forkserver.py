"""Workers without the wait: a server process imports torch once, and each worker is forked from it.

The server touches no device and starts no threads, so that forking is safe; it exits when the
launcher is gone, and the workers with it (they ask the kernel for that).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from multiprocessing import forkserver

ENTRY = "colotrain.engine.worker"
ENVIRONMENT = {
    # the rendezvous store of a dead attempt must not be reused: restarts hang half of the time
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def warm_up() -> None:
    """Begin to start the server; returns at once. Called early, it hides its imports' time."""
    os.environ.update(ENVIRONMENT)  # before torch is imported here or there
    multiprocessing.get_context("forkserver").set_forkserver_preload([ENTRY])
    threading.Thread(target=forkserver.ensure_running, daemon=True).start()


def work(module: str, rundir: str) -> None:
    """Body of a worker process: `module.main(rundir)`, whose result is the exit code."""
    code = importlib.import_module(module).main(rundir)
    if code:
        os._exit(code)
