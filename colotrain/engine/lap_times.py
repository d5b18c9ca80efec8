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

import torch


class Clock:
    """The host's seconds in the parts of one step, one after the other."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, *, less: float = 0.0) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last - less, now

    def leave_out(self) -> None:
        """Count the time since the last lap in none."""
        self.last = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self.started


class DeviceClock:
    """A GPU's seconds in the parts of each step; elsewhere it measures nothing.

    An update is still being computed when its step is recorded. Its seconds are therefore returned
    with the next step, whose time by the host's clock contains them too: the host waits for the
    update at the end of the next backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, torch.cuda.Event] = {}
        self._fetches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._update: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events around the last update, until they are read."""
        self.step_s: float | None = None
        """Seconds from the beginning of the last step to its update; None before there is one."""

    def begin_step(self) -> None:
        self._marks, self._fetches = {}, []
        self.mark("begun")

    def mark(self, name: str) -> None:
        """Note that the GPU's queue has come to `name`.

        In this order: begun, computed, reduced, after something that is no part of training
        resumed, updated.
        """
        if self.device.type == "cuda":
            self._marks[name] = self._event()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Measure how long the GPU has nothing to do but to wait for a micro-batch."""
        if self.device.type != "cuda":
            yield
            return
        before = self._event()
        yield
        self._fetches.append((before, self._event()))

    def seconds(self) -> dict[str, float | None]:
        """Return data_s, compute_s and reduce_s of this step, and optimizer_s of the one before.

        Call it after the host has waited for "reduced" and "updated" is marked; empty on CPU.
        """
        if self.device.type != "cuda":
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
