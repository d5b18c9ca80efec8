"""`colotrain dashboard`: watch a run, or print or export one frame of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from colotrain.cli.arguments import refuse, write_file
from colotrain.errors import ColotrainError, UsageError, suggest
from colotrain.events.event import Event
from colotrain.events.fold import Fold, fold, follow
from colotrain.events.liveness import find, state
from colotrain.events.log import EventReader
from colotrain.events.view import LIVE, RunView
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.runs.fetching import followed
from colotrain.show.console import picture_console, print_json, stdout_console
from colotrain.show.dashboard import KEYS, render
from colotrain.show.frame import FOCI, Focus, FrameState
from colotrain.show.live import FRAME_S, Screen, replay, watch
from colotrain.show.progress import PlainProgress, in_foreground
from colotrain.show.terminal import is_live
from colotrain.show.worker_output import last_lines
from colotrain.spec.plan import RunPlan

PICTURE = (140, 40)
"""Columns and lines of an exported frame."""
LINES_WITHOUT_TERMINAL = 40
REPLAY_S = 20.0


def dashboard(
    name: str | None,
    *,
    once: bool = False,
    as_json: bool = False,
    svg: str = "",
    html: str = "",
    again: bool = False,
    focus: str = FOCI[0],
) -> int:
    """Show a run: live, one frame (`once`), as JSON, as a picture, or as a replay (`again`)."""
    if focus not in FOCI:
        expected = f"expected one of {', '.join(FOCI)}"
        raise UsageError(f"--view {focus}: {expected}", suggest(focus, FOCI))
    if as_json:
        refuse("--json", svg=svg, html=html, replay=again)
    if again:
        refuse("--replay", svg=svg, html=html, once=once)
    frames = once or as_json or svg or html or again
    with followed(name, follow=not frames) as found:
        rundir = find(found)
        _show(rundir, once=once, as_json=as_json, svg=svg, html=html, again=again, focus=focus)
    return 0


def _show(
    rundir: RunDir, *, once: bool, as_json: bool, svg: str, html: str, again: bool, focus: Focus
) -> None:
    plan, console = rundir.plan(), stdout_console()
    if as_json:
        view = follow(rundir, outline=True)
        now = state(rundir, view)
        print_json({"run": rundir.name, "state": now, **to_plain(view)})
    elif svg or html:
        export(rundir, plan, svg=svg, html=html, focus=focus)
    elif again:
        play(console, plan, rundir, focus)
    elif once:
        print_frame(console, rundir, plan, follow(rundir, outline=True), focus)
    elif is_live(console) and in_foreground(console):
        watch(console, plan, rundir, focus=focus)
    else:
        follow_as_lines(console, rundir, plan, focus)


def print_frame(
    console: Console, rundir: RunDir, plan: RunPlan, view: RunView, focus: Focus
) -> None:
    height = console.height - 1 if console.is_terminal else LINES_WITHOUT_TERMINAL
    frame = frame_of(rundir, plan, view)
    console.print(render(frame, width=console.width, height=height, focus=focus))


def frame_of(rundir: RunDir, plan: RunPlan, view: RunView) -> FrameState:
    """Return the state of the run at this moment."""
    return FrameState(
        view=view,
        plan=plan,
        now=time.time(),
        state=state(rundir, view),
        output=last_lines(rundir),
    )


def export(rundir: RunDir, plan: RunPlan, *, svg: str, html: str, focus: Focus) -> None:
    """Write a frame as a picture."""
    width, height = PICTURE
    console = picture_console(width=width, height=height)
    frame = frame_of(rundir, plan, follow(rundir, outline=True))
    console.print(render(frame, width=width, height=height, focus=focus))
    if svg:
        write_file(svg, console.export_svg(title=f"colotrain {rundir.name}", clear=False))
    if html:
        write_file(html, console.export_html(clear=False))


def follow_as_lines(console: Console, rundir: RunDir, plan: RunPlan, focus: Focus) -> None:
    """Print lines per interval and event until the run ends; of an ended run, one frame."""
    reader, seen = EventReader(rundir, outline=True), Fold(max_steps=plan.train.max_steps)
    view = seen.add(reader.drain()).view()
    if state(rundir, view) not in LIVE:
        print_frame(console, rundir, plan, view, focus)
        return
    shown = PlainProgress(console, plan, past=True)
    while state(rundir, view) in LIVE:
        time.sleep(FRAME_S)
        fresh = reader.drain()
        view = seen.add(fresh).view()
        shown.update(view, fresh)


def play(console: Console, plan: RunPlan, rundir: RunDir, focus: Focus) -> None:
    """Replay a run in `REPLAY_S` seconds; without a terminal, print its lines at once."""
    events = sorted(EventReader(rundir, outline=True).drain(), key=lambda event: event.t)
    if not events:
        raise ColotrainError(f"{rundir.name}: nothing has happened yet", "start it first")
    if not is_live(console) or not in_foreground(console):
        PlainProgress(console, plan, past=True).update(fold(events), events)
        return
    screen = Screen(console, plan, rundir, footer=f"{KEYS}  q quit  (replay)")
    screen.focus = focus
    with screen.terminal:

        def show(view: RunView, fresh: Sequence[Event], now: float) -> bool:
            screen.draw(view, now=now, state=view.status)
            return screen.press(screen.terminal.keys(FRAME_S))

        replay(plan, events, show, num_frames=int(REPLAY_S / FRAME_S))
        view = fold(events, max_steps=plan.train.max_steps)
        while not screen.press(screen.terminal.keys(FRAME_S)):
            screen.draw(view, now=events[-1].t, state=view.status)
