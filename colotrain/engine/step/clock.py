"""Seconds of the parts of a step, by the host's clock and by that of a GPU.

A GPU works through a queue. The host only fills the queue, and waits for the GPU once per step, so
its clock shows the GPU's time in whatever it does when the queue is full. On a GPU the parts are
therefore measured by CUDA events, which are read once the wait has passed them: reading never
waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from colotrain.engine.comms.waiting import waited_s

MARKS = {"compute_s": "computed", "optimizer_s": "updated"}
"""Part of a step → mark in a GPU's queue at its end. What ends `reduce_s` is a wait of the host."""


class StepClock:
    """Seconds of the parts of a step: `lap` ends one part and begins the next.

    A GPU's update is still being computed when its step is recorded. Its seconds are therefore
    returned with the next step, whose time by the host's clock contains them too: the host waits
    for the update at the end of the next backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.laps: dict[str, float] = {}
        """Part → the host's seconds."""
        self.data_s = 0.0
        self.step_s: float | None = None
        """A GPU's seconds from the beginning of the last step to its update; None before that."""
        self._marks: dict[str, torch.cuda.Event] = {}
        self._fetches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._update: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events around the last update, until they are read."""

    def begin_step(self) -> None:
        self._started = self._last = time.perf_counter()
        self._waited_before_s, self.data_s, self.laps = waited_s(), 0.0, {}
        self._marks, self._fetches = {}, []
        self.mark("begun")

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Measure how long there is nothing to do but to wait for a micro-batch."""
        started, before = time.perf_counter(), self._event() if self.on_gpu else None
        yield
        if before is not None:
            self._fetches.append((before, self._event()))
        self.data_s += time.perf_counter() - started

    def lap(self, name: str, *, less: float = 0.0) -> None:
        """End the part `name` of the step, without `less` seconds of it."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last - less, now
        if name in MARKS:
            self.mark(MARKS[name])

    def leave_out(self) -> None:
        """Count the time since the last lap in none: it was no part of training."""
        self._last = time.perf_counter()
        self.mark("resumed")

    def mark(self, name: str) -> None:
        """Note that the GPU's queue has come to `name`.

        In this order: begun, computed, reduced, after something that is no part of training
        resumed, updated.
        """
        if self.on_gpu:
            self._marks[name] = self._event()

    def times(self) -> dict[str, Any]:
        """Return the seconds of the step and of its parts, once the host has waited for it."""
        total_s = time.perf_counter() - self._started
        times = {"step_s": total_s, "data_s": self.data_s, **self.laps, **self._gpu_seconds()}
        if self.device.type == "cpu":  # elsewhere the host only queues collectives
            times["wait_s"] = waited_s() - self._waited_before_s
        return times

    def _gpu_seconds(self) -> dict[str, float | None]:
        """Return data_s, compute_s and reduce_s of this step, and optimizer_s of the one before.

        Call it after the host has waited for "reduced" and "updated" is marked; empty on CPU.
        """
        if not self.on_gpu:
            return {}
        begun, computed = self._marks["begun"], self._marks["computed"]
        reduced, updated = self._marks["reduced"], self._marks["updated"]
        data_s = sum(_seconds(before, after) for before, after in self._fetches)
        update_s = _seconds(*self._update) if self._update is not None else None
        self._update = self._marks.get("resumed", reduced), updated
        self.step_s = _seconds(begun, reduced)
        return {
            "data_s": data_s,
            "compute_s": _seconds(begun, computed) - data_s,
            "reduce_s": _seconds(computed, reduced),
            "optimizer_s": update_s,
        }

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    return before.elapsed_time(after) / 1000
