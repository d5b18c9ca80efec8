"""Logs of a run: those of the newest attempt's workers, of its launcher and of its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colotrain.errors import printable
from colotrain.events.kinds import LaunchStarted, WorkerStarted
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir, open_inside
from colotrain.show.console import tell

LAUNCHER, JOB = "launcher", "job"
LAUNCHERS = {LAUNCHER, JOB}
"""Names of the logs in which a launcher's output is."""
READ_BYTES = 1 << 20
"""Maximum number of bytes read from one file at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    """Prefix of each line."""
    path: Path
    folder: Path
    """The run directory, inside which no link to the file is followed."""


def sources(
    rundir: RunDir, *, job_logs: Sequence[Path] = (), rank: int | None = None
) -> list[Source]:
    """Return the existing logs: of one rank, or of all ranks, the launcher and the job.

    Each worker's first event names its log, which is looked for in this run's folder alone. A
    detached launcher has a log; that of an earlier launch is left out.
    """
    found = []
    events = EventReader(rundir).drain()
    started = {e.rank: e for e in events if e.kind == WorkerStarted.KIND}
    newest = max((event.attempt or 0 for event in started.values()), default=0)
    for number, event in sorted(started.items(), key=lambda item: item[0] or 0):
        log = _log_in(rundir, WorkerStarted.of(event).log)
        if log is None or event.attempt != newest or rank not in (None, number):
            continue
        for stream in ("stdout", "stderr"):
            path = log.with_name(f"{stream}.log")
            if path.is_file():
                name = f"rank {number} {stream}"
                found.append(Source(name=name, path=path, folder=rundir.path))
    if rank is None:
        launched_at = max((e.t for e in events if e.kind == LaunchStarted.KIND), default=0.0)
        printed = rundir.launcher_log
        if printed.is_file() and printed.stat().st_mtime >= launched_at:
            found.append(Source(name=LAUNCHER, path=printed, folder=rundir.path))
        for node, path in enumerate(job_logs):
            if path.is_file():
                name = f"{JOB} node {node}" if node else JOB
                found.append(Source(name=name, path=path, folder=path.parents[1]))
    return found


def _log_in(rundir: RunDir, written: str) -> Path | None:
    """Return where a log that an event names is in this run, which may have been moved since."""
    parts = Path(written).parts
    if rundir.logs.name not in parts[:-1]:
        return None
    return rundir.logs.joinpath(*parts[len(parts) - parts[::-1].index(rundir.logs.name) :])


class Lines:
    """Reads the lines of a growing file."""

    def __init__(self, source: Source) -> None:
        self.source, self.offset = source, 0
        self._open, self._failed = partial(open_inside, source.folder), False

    def last(self, num: int) -> list[str]:
        """Return the last `num` lines; `more` continues after them."""
        try:
            size = self.source.path.stat().st_size
        except OSError:
            return []
        self.offset = max(0, size - READ_BYTES)
        cut = self.offset > 0
        return list(self.more())[cut:][-num:] if num else list(self.more())[:0]

    def more(self) -> Iterator[str]:
        """Yield the complete lines added since the last call."""
        try:
            with open(self.source.path, "rb", opener=self._open) as file:
                file.seek(self.offset)
                chunk = file.read(READ_BYTES)
        except OSError as error:
            if not self._failed:
                tell(f"warning: {self.source.path}: {error.strerror}")
            self._failed = True
            return
        end = chunk.rfind(b"\n") + 1
        if len(chunk) == READ_BYTES and not end:
            end = len(chunk)
        self.offset += end
        for line in chunk[:end].decode("utf-8", "replace").splitlines():
            yield f"{self.source.name}: {printable(line)}"
