"""`colotrain profile`: where the time of a step goes, from traces of torch's profiler."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table
from rich.text import Text

from colotrain.errors import ColotrainError, UsageError, fix_of
from colotrain.events.fold import Fold, follow
from colotrain.events.kinds import Note, Traced
from colotrain.events.liveness import find, is_waiting, state
from colotrain.events.log import EventReader
from colotrain.events.traces import INVALID, NAME, OF_BLOCKS, Breakdown, break_down, read_trace
from colotrain.events.view import LIVE
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.show.console import print_json, stdout_console
from colotrain.show.formatting import clean

POLL_S = 0.1
TIMEOUT_S = 120.0
"""Seconds without any event of the traced ranks after which the request is given up."""


def profile(name: str | None, *, num_steps: int, ranks: str, last: bool, as_json: bool) -> int:
    """Show traces: new ones of a running job, or else the newest there are."""
    rundir = find(name)
    view = follow(rundir, ranks={0})
    now = state(rundir, view)
    if now in LIVE and not is_waiting(rundir, view) and not last:
        chosen = _ranks(ranks, rundir.plan().world_size)
        paths = ask(rundir, num_steps=num_steps, ranks=chosen)
    else:
        paths = newest(rundir)
    if not paths:
        fix = "set train.profile.steps=[FIRST,LAST], or name a run that goes on"
        raise UsageError(f"{rundir.name} ({now}): has no traces", fix)
    found = {path: _read(rundir, path) for path in paths}
    if as_json:
        traces = [{"path": str(path), **to_plain(known)} for path, known in found.items()]
        print_json({"run": rundir.name, "traces": traces})
        return 0
    for path, known in found.items():
        show(path, known)
    return 0


def ask(rundir: RunDir, *, num_steps: int, ranks: tuple[int, ...]) -> list[Path]:
    """Ask a running job for traces, and wait for all of them."""
    reader, fold, traced = EventReader(rundir, ranks={0, *ranks}), Fold(), dict[int, Path]()
    fold.add(reader.drain())
    if rundir.profile_request_file.exists():
        fix = "wait until those are there, or look at them with --last"
        raise UsageError(f"{rundir.name}: traces are being taken already", fix)
    rundir.request_profile(num_steps=num_steps, ranks=ranks)
    heard = time.monotonic()
    while len(traced) < len(ranks) or rundir.profile_request_file.exists():
        fresh = reader.drain()
        view = fold.add(fresh).view()
        heard = time.monotonic() if fresh else heard
        for event in fresh:
            if event.kind == Traced.KIND and event.rank in ranks:
                traced[event.rank] = rundir.traces / Path(Traced.of(event).path).name
            elif event.kind == Note.KIND and Note.of(event).text.startswith("no trace: "):
                rundir.profile_request_file.unlink(missing_ok=True)
                raise ColotrainError(f"{rundir.name}: {Note.of(event).text}", "see its logs")
        over = state(rundir, view)
        if over not in LIVE and len(traced) < len(ranks):
            rundir.profile_request_file.unlink(missing_ok=True)
            raise ColotrainError(f"{rundir.name}: {over} before it made {num_steps} more steps")
        if time.monotonic() - heard > TIMEOUT_S:
            rundir.profile_request_file.unlink(missing_ok=True)
            problem = f"{rundir.name}: made no step in {TIMEOUT_S:.0f} s"
            raise ColotrainError(problem, "is it making steps? `colotrain runs`")
        time.sleep(POLL_S)
    return [traced[rank] for rank in sorted(traced)]


def newest(rundir: RunDir) -> list[Path]:
    """Return the traces of the window that was written last, by rank."""
    windows = {path: m[1] for path in rundir.traces.glob("*") if (m := NAME.fullmatch(path.name))}
    if not windows:
        return []
    newest = max(windows, key=lambda path: path.lstat().st_mtime)
    return sorted(path for path, window in windows.items() if window == windows[newest])


def show(path: Path, known: Breakdown) -> None:
    """Print where the time of one rank's steps went."""
    console = stdout_console()
    first, last = known.steps[0], known.steps[-1]
    named = NAME.fullmatch(path.name)
    head = f"rank {int(named[2]) if named else '?'}, steps {first} to {last}: "
    head += f"{known.step_s * 1e3:,.1f} ms a step"
    busy = ""
    if known.device_s is not None:
        busy = f"; the GPU was busy for {known.device_s * 1e3:,.1f} ms, times below are the host's"
    console.print(head + busy)
    table = _table("PART", "MS", "SHARE")
    for part, seconds in known.parts.items():
        share = seconds / known.step_s if known.step_s else 0.0
        table.add_row(Text(clean(part)), f"{seconds * 1e3:,.2f}", f"{share:.1%}")
    console.print(table)
    if known.blocks:
        of_blocks = _table("BLOCK", *(f"{part} ms".upper() for part in OF_BLOCKS))
        for name, parts in known.blocks.items():
            cells = (f"{parts[p] * 1e3:,.2f}" if p in parts else "" for p in OF_BLOCKS)
            of_blocks.add_row(Text(clean(name)), *cells)
        console.print(of_blocks)
    console.print(f"trace: {path} (open it in ui.perfetto.dev)", soft_wrap=True, markup=False)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _ranks(text: str, world_size: int) -> tuple[int, ...]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 0 or found[-1] >= world_size:
        raise UsageError(f"--ranks {text}: expected ranks from 0 to {world_size - 1}", "as in 0,1")
    return tuple(found)


def _read(rundir: RunDir, path: Path) -> Breakdown:
    try:
        return break_down(read_trace(path, rundir.open))
    except INVALID as error:
        fix = fix_of(error, "take another trace")
        raise UsageError(f"{path}: is no trace of colotrain's ({error})", fix) from error
