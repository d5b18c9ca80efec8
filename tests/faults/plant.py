"""Faults that `train.on_gradients=tests.faults.plant:nothing` plants in a worker.

The environment's PLANT is JSON: {"what": ..., "rank": 1, "step": 3}, or {"kills": [...]} with one
{"whom": "self" | "launcher", "rank": 0, "operation": 7} for each attempt in turn. Everything
happens once: a file beside the run says that it did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ORDER: dict[str, Any] = json.loads(os.environ.get("PLANT", "{}"))
KILLS = ORDER.get("kills", [])
DONE = sum(os.path.exists(f"planted-{number}") for number in range(len(KILLS)))
if len(KILLS) > DONE:
    ORDER = KILLS[DONE] | {"marker": f"planted-{DONE}"}
MINE = ORDER.get("rank") == int(os.environ.get("RANK", "-1"))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
seen = 0


def once(marker: str = ORDER.get("marker", "planted")) -> bool:
    """Whether it is to happen now, for the first time."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return ORDER.get("always", False)
    return True


def nothing(model: Any, step: int) -> None:
    """Called with the gradients of every step; `step` counts from 0."""
    if MINE and ORDER.get("what") == "pause" and step + 1 in ORDER["steps"]:
        pause(step + 1)
    elif MINE and ORDER.get("step") == step + 1 and ORDER["what"] in FAULTS and once():
        FAULTS[ORDER["what"]](model)


def kill(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(model: Any) -> None:
    time.sleep(3600)


def stop(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(model: Any) -> None:
    os._exit(0)


def refuse(model: Any) -> None:
    raise ValueError("the reactor is too warm")


def terminate(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def allocate(model: Any) -> None:
    limit, kept = ORDER.get("limit", ""), []
    if limit:  # a memory cgroup, which this process joins
        with open(limit, "w") as tasks:
            tasks.write(str(os.getpid()))
    while True:
        kept.append(bytearray(os.urandom(1 << 20) * 32))


def pause(step: int) -> None:
    """Until there is a file `go-STEP`."""
    for _ in range(2400):
        if os.path.exists(f"go-{step}"):
            return
        time.sleep(0.05)


def flip(model: Any) -> None:
    """One bit of the first weight that this rank holds, as soon as the next step begins."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    parameters = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    bits = next(p for p in parameters if p.numel()).detach().view(-1).view(torch.int32)

    def hook(*_: Any) -> None:
        bits[0] ^= 1 << 20
        handle.remove()

    handle = register_module_forward_pre_hook(hook)


def kill_parent(model: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kill_host(model: Any) -> None:
    """Its launcher, with which all its ranks go: the launcher of another node learns of it last."""
    frame: Any = sys._getframe()
    while getattr(frame.f_locals.get("run"), "copies", None) is None:
        frame = frame.f_back
    os.kill(frame.f_locals["run"].copies.places.launcher, signal.SIGKILL)
    time.sleep(60)


PLANTS = (kill, kill_parent, kill_host, hang, stop, leave, refuse, terminate, allocate, flip)
FAULTS = {fault.__name__: fault for fault in PLANTS}


def at_file_operation(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: ends a process before the n-th change of the checkpoints' folder."""
    global seen
    if event == "open":
        path, flags = arguments[0], arguments[2]
        if not isinstance(flags, int) or not flags & WRITES:
            return
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
        path = arguments[0]
    else:
        return
    if "/checkpoints/" not in os.fsdecode(path if isinstance(path, str | bytes) else ""):
        return
    seen += 1
    if seen == ORDER["operation"] and once():
        launcher = int(Path("launcher.pid").read_text())
        os.kill(launcher if ORDER["whom"] == "launcher" else os.getpid(), signal.SIGKILL)
        time.sleep(60)  # who kills its launcher goes with it


if MINE and "operation" in ORDER:
    sys.addaudithook(at_file_operation)
