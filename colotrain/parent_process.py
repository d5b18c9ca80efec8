"""Ends this process together with another one."""

from __future__ import annotations

import os
import select
import signal
import threading
import time


def die_with(pid: int) -> None:
    """Kill this process as soon as process `pid` is gone for any reason. Returns at once."""
    threading.Thread(target=_wait_and_die, args=(pid,), daemon=True).start()


def _wait_and_die(pid: int) -> None:
    try:
        select.select([os.pidfd_open(pid)], [], [])
    except ProcessLookupError:
        pass
    except OSError:  # pidfd is not supported: check once a second
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
