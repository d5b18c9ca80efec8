"""The events that a run of colotrain has, of a process that is observed: for its dashboards."""

from __future__ import annotations

import atexit
import os
import resource
import socket
import time
from typing import Any

import torch
from torch import nn

from colotrain.audit import model
from colotrain.audit.records import ObservedProcess
from colotrain.audit.window import Window
from colotrain.events.gradients import Gradients, Parameters
from colotrain.events.kinds import Step, WorkerFinished, WorkerStarted
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir


class Report:
    """Writes the events of one process from its first step on."""

    def __init__(self, rundir: RunDir) -> None:
        self.events = EventWriter(rundir.event_file(rank=rank(), attempt=0), inside=rundir.path)
        self.last_at = time.time()
        self.names: list[str] = []
        self.steps, self.is_over = 0, False
        atexit.register(self._at_exit, os.getpid())

    def begin(self, roots: model.Roots) -> ObservedProcess:
        """Write which process this is and what it trains, and return it for the checks."""
        modules, parameters = roots.training(), roots.parameters()
        self.events.write(
            WorkerStarted(
                rank=rank(),
                world_size=world_size(),
                attempt=0,
                pid=os.getpid(),
                host=socket.gethostname(),
                device=next((str(p.device) for p in parameters.values()), "cpu"),
                log="",
                step=0,
            )
        )
        self.name(roots)
        return ObservedProcess(
            rank=rank(),
            world_size=world_size(),
            pid=os.getpid(),
            torch=str(torch.__version__),
            model=type(model.inner(modules[0])).__name__ if modules else "",
            framework=model.framework(roots.all()),
        )

    def name(self, roots: model.Roots) -> None:
        """Write the names of the columns of gradients that follow: collective under FSDP."""
        parameters, aliases = roots.parameters(), roots.aliases()
        with model.gathered(roots.all()):
            shapes = [list(shape_of(p)) for p in parameters.values()]
        self.names = list(parameters)
        self.events.write(
            Parameters(
                names=list(parameters),
                shapes=shapes,
                dtypes=[str(p.dtype).removeprefix("torch.") for p in parameters.values()],
                aliases={name: aliases[name] for name in parameters if name in aliases},
            )
        )

    def step(
        self,
        step: int,
        window: Window,
        rows: dict[str, dict[str, Any]] | None,
        roots: model.Roots,
        *,
        lr: float | None,
        total: int,
    ) -> None:
        """Write a step; `rows` are the gradients if it was looked into, `total` this rank's
        micro-batches."""
        self.steps, now = step, time.time()
        if rows is not None and list(rows) != self.names:
            self.name(roots)
        if rows is not None and rank() == 0:
            self.events.write(gradient_event(step, rows))
        losses, clip = undivided(window), window.clips[-1] if window.clips else {}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.events.write(
            Step(
                step=step,
                step_s=now - self.last_at,
                data_s=None,
                compute_s=None,
                reduce_s=None,
                optimizer_s=None,
                micro_batches=window.micro_batches,
                samples=[],
                rss=peak,
                peak=peak,
                loss=sum(losses) / len(losses) if losses else None,
                grad_norm=clip.get("norm"),
                lr=lr,
                optimizer_steps=step,
                total_micro_batches=total * world_size(),
            )
        )
        self.last_at = now

    def end(self, step: int) -> None:
        if not self.is_over:
            self.is_over = True
            self.events.write(WorkerFinished(step=step))

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # not in a fork
            self.end(self.steps)


def gradient_event(step: int, rows: dict[str, dict[str, Any]]) -> Gradients:
    norms = [row["norm"] for row in rows.values() if row["norm"] is not None]
    columns: dict[str, Any] = {
        key: [row[key] for row in rows.values()]
        for key in ("status", "norm", "rms", "max_abs", "zero_fraction", "nonfinite")
    }
    return Gradients(
        step=step,
        global_norm=sum(n * n for n in norms) ** 0.5,
        clipped_to=None,
        reason={name: row["reason"] for name, row in rows.items() if row["reason"]},
        update_ratio=[None] * len(rows),
        **columns,
    )


def undivided(window: Window) -> list[float]:
    """Return the micro-batches' losses before factors were applied."""
    return [float(loss) / (factor or 1.0) for loss, factor in window.losses]


def shape_of(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)
