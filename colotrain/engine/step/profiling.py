"""Traces of a few steps by torch's profiler, as planned or on request, without any collective."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from colotrain.engine.sharding.spans import Spans
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.evaluation import is_over
from colotrain.engine.step.participant import Any_, Ask, Participant, StepResult
from colotrain.errors import message_of
from colotrain.events.kinds import Note, Traced
from colotrain.spec.observing import ProfilePlan


class Profiler(Participant):
    """Traces the steps of this rank that the plan names, and those that somebody asks for.

    Its failures are notes: a trace never ends a run.
    """

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.planned = run.plan.train.profile
        self.window: ProfilePlan | None = None
        """Steps and ranks of the trace that is being taken, on whatever rank."""
        self._torch: Any = None
        """torch's profiler while this rank takes a trace."""
        self._spans = Spans()
        self._first = 0
        self._asked = False
        """Whether the window was asked for."""

    def asks(self) -> Mapping[str, Ask]:
        asked = self.run.rank == 0 and self.run.rundir.profile_request() is not None
        return {"profile": Any_(asked)}

    def after_step(self, result: StepResult | None) -> None:
        if result is not None and not result.stops:
            self._end_step(asked=result.agreed["profile"])
        if (result is not None and result.stops) or is_over(self.run):
            self.close()
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        step, planned = self.run.step + 1, self.planned
        if self.window is None and planned is not None and planned.first <= step <= planned.last:
            self.window = planned
        if self.window is None or self.run.rank not in self.window.ranks:
            return
        if self._torch is None:
            self._try(self._start)
        if self._torch is not None:
            self._spans.begin_step(step)

    def _end_step(self, *, asked: bool) -> None:
        """End the step that is done; `asked`: somebody asks for a trace, as all ranks agree."""
        if self.window is None:
            if asked:
                self._begin_window()
            return
        if self.run.step >= self.window.last:
            self.close()
        elif self._torch is not None:
            self._spans.end_step()

    def close(self) -> None:
        """Write the trace that is being taken, if any, and close the window."""
        if self._torch is not None:
            self._try(self._write)
            self._torch = None
        if self._asked and self.run.rank == 0:
            self.run.rundir.profile_request_file.unlink(missing_ok=True)
        self.window, self._asked = None, False

    def _begin_window(self) -> None:
        asked = self.run.rundir.profile_request()
        if asked is not None:
            num_steps, ranks = asked
            first = self.run.step + 1
            self.window = ProfilePlan(first=first, last=first + num_steps - 1, ranks=ranks)
            self._asked = True

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        cuda = [ProfilerActivity.CUDA] if self.run.device.type == "cuda" else []
        profiler = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
        self._spans.install(self.run.sharded)
        profiler.start()
        self._torch, self._first = profiler, self.run.step + 1

    def _write(self) -> None:
        """Write the trace under another name first: a reader finds it whole or not at all."""
        run, last = self.run, self.run.step
        self._spans.remove()
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        self._torch.stop()
        if last < self._first:  # stopped within its first step
            return
        path = run.rundir.trace_file(first=self._first, last=last, rank=run.rank)
        run.rundir.make_folder(path.parent)
        temporary = path.with_name(f".{path.name}")  # its name says that it is compressed
        temporary.unlink(missing_ok=True)
        os.close(run.rundir.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self._torch.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
        run.events.write(Traced(first=self._first, last=last, path=str(path)))
        if self.window is not None and run.rank == min(self.window.ranks):
            done = f"steps {self._first} to {last} were traced"
            text = f"{done}: `colotrain profile {run.rundir.argument}` shows where their time went"
            run.events.write(Note(step=last, text=text))

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self._spans.remove()
            self._torch = None
            if self.window is not None:  # no second attempt
                self.window = replace(self.window, ranks=())
            text = f"no trace: {type(error).__name__}: {' '.join(message_of(error).split())}"
            self.run.events.write(Note(step=self.run.step, text=text))
