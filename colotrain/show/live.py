"""The dashboard on a terminal, for the run that this process launches or for any other."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TextIO

from rich.console import Console

from colotrain.events import liveness
from colotrain.events.event import Event
from colotrain.events.fold import Fold
from colotrain.events.kinds import Failure, Note, Restart, Resumed, WorkerStopped
from colotrain.events.log import EventReader
from colotrain.events.view import ENDED, RunView
from colotrain.rundir import RunDir
from colotrain.show.dashboard import KEYS, render
from colotrain.show.formatting import clean
from colotrain.show.frame import FOCI, Focus, FrameState
from colotrain.show.progress import PlainProgress, ProgressView, in_foreground, message_of
from colotrain.show.terminal import Terminal, is_live
from colotrain.show.worker_output import last_lines
from colotrain.spec.plan import RunPlan

FRAME_S = 0.25
LOOK_S = 1.0
"""Seconds between checks of what is not in the events: worker output and the launcher's state."""
LASTING = (Restart.KIND, Failure.KIND, Note.KIND, WorkerStopped.KIND, Resumed.KIND)
"""Events whose messages stay on the terminal after the dashboard is closed."""
MESSAGES_KEPT = 50


class Screen:
    """Draws frames of one run on a terminal, and handles the keys that choose what they show."""

    def __init__(self, console: Console, plan: RunPlan, rundir: RunDir, *, footer: str) -> None:
        self.plan, self.rundir, self.footer = plan, rundir, footer
        self.terminal = Terminal(console)
        self.focus: Focus = "overview"
        self._drawn_at = self._looked_at = -LOOK_S
        self._news: tuple[float | None, str] | None = None
        """Last event time and status of the last frame; while both stay, only its clocks change."""
        self._output: tuple[str, ...] = ()
        self._state = ""

    def press(self, keys: str) -> bool:
        """Handle `keys`; return whether one of them was q."""
        for key in keys:
            if key == "\t":
                self.focus = FOCI[(FOCI.index(self.focus) + 1) % len(FOCI)]
            elif key in "1234":
                self.focus = FOCI[int(key) - 1]
            self._drawn_at = -LOOK_S
        return "q" in keys.lower()

    def draw(self, view: RunView, *, now: float | None = None, state: str | None = None) -> None:
        """Draw a frame unless the last one is recent. `now` and `state` are given in a replay."""
        clock = time.monotonic()
        news = view.last_event_at, view.status
        if clock - self._drawn_at < (LOOK_S if news == self._news else FRAME_S * 0.9):
            return
        self._drawn_at, self._news = clock, news
        if clock - self._looked_at >= LOOK_S or view.status in ENDED:
            self._looked_at, self._output = clock, last_lines(self.rundir)
            self._state = state or liveness.state(self.rundir, view)
        frame = FrameState(
            view=view,
            plan=self.plan,
            now=time.time() if now is None else now,
            state=state or self._state,
            output=self._output,
        )
        width, height = self.terminal.console.size
        rendered = render(frame, width=width, height=height, focus=self.focus, footer=self.footer)
        self.terminal.draw(rendered)


class LiveDashboard(ProgressView):
    """Shows the run that this process launches.

    As soon as the run is asked to stop, the dashboard closes and messages are printed: the next
    Ctrl-C ends the process at once, and must not leave the terminal in a broken state.
    """

    def __init__(self, console: Console, plan: RunPlan, rundir: RunDir) -> None:
        super().__init__(console, plan)
        self._rundir = rundir
        self._screen = Screen(console, plan, rundir, footer=f"{KEYS}  Ctrl-C save and stop")
        self._lasting: deque[Event] = deque(maxlen=MESSAGES_KEPT)
        self._stderr: TextIO = sys.stderr
        self._held = StringIO()
        self._shown, self._yields = False, False

    def __enter__(self) -> LiveDashboard:
        self._stderr, sys.stderr = sys.stderr, self._held  # a warning would garble the frame
        self._screen.terminal.__enter__()
        self._shown = True
        self._screen.draw(RunView(), state="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        told = [event for event in new_events if self._is_shown(event)]
        if not self._shown:
            self._print(told)
            return
        if not self._yields:  # the launch has installed its signal handlers by now
            self._yields = True
            self._screen.terminal.yield_to(signal.SIGINT, signal.SIGTERM)
        self._lasting += [event for event in told if event.kind in LASTING]
        self._screen.press(self._screen.terminal.keys())
        self._screen.draw(view, state=view.status)
        if self._rundir.stop_file.exists() or not self._screen.terminal.active:
            self._leave()  # the launch prints what happens now

    def _leave(self) -> None:
        if not self._shown:
            return
        self._shown = False
        self._screen.terminal.leave()
        sys.stderr = self._stderr
        self._print(list(self._lasting))
        for line in self._held.getvalue().splitlines()[-MESSAGES_KEPT:]:
            self.console.print(clean(line), markup=False, highlight=False, soft_wrap=True)

    def _print(self, events: Sequence[Event]) -> None:
        for event in events:
            if message := message_of(event):
                self.console.print(message, soft_wrap=True)


def progress_for(console: Console, plan: RunPlan, rundir: RunDir) -> ProgressView:
    """Return the dashboard on a terminal, else plain lines (no terminal, TERM=dumb, CI)."""
    if not is_live(console) or not in_foreground(console):
        return PlainProgress(console, plan)
    return LiveDashboard(console, plan, rundir)


def watch(console: Console, plan: RunPlan, rundir: RunDir, *, focus: Focus = "overview") -> None:
    """Show a run until q is pressed, also after it has ended. The run itself is not affected."""
    reader, fold = EventReader(rundir, outline=True), Fold(max_steps=plan.train.max_steps)
    screen = Screen(console, plan, rundir, footer=f"{KEYS}  q quit (training goes on)")
    screen.focus = focus
    with screen.terminal:
        while True:
            screen.draw(fold.add(reader.poll()).view())
            if screen.press(screen.terminal.keys(0.0 if reader.behind else FRAME_S)):
                return


def replay(
    plan: RunPlan,
    events: Sequence[Event],
    show: Callable[[RunView, Sequence[Event], float], bool],
    *,
    num_frames: int,
) -> None:
    """Replay a run in `num_frames` parts of equal duration, until `show` returns True.

    `show` gets the view, the new events, and the Unix time of the frame.
    """
    fold, rest = Fold(max_steps=plan.train.max_steps), deque(events)
    start, end = (events[0].t, events[-1].t) if events else (0.0, 0.0)
    for number in range(1, num_frames + 1):
        now = end if number == num_frames else start + (end - start) * number / num_frames
        fresh = []
        while rest and (rest[0].t <= now or number == num_frames):
            fresh.append(rest.popleft())
        if show(fold.add(fresh).view(), fresh, now):
            return
