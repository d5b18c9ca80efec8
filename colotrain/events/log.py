"""Event files: append-only JSON lines, one file per rank and attempt and one per launcher.

Writers never block training and never raise into it. Readers follow files that are still being
written, on this machine or over a shared filesystem: an incomplete last line waits for the next
poll; a line that is not an event is skipped and counted. Numbers that JSON cannot represent are
written as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from colotrain.errors import MOST_WRITTEN, shortened
from colotrain.events.event import Event, EventKind
from colotrain.records import from_json
from colotrain.rundir import Opener, RunDir, open_inside, regular

LINE_LIMIT = 16 << 20
"""Maximum bytes per read of one file; a longer line is passed over."""
MOST_PASSED_OVER = 64 << 20
"""Bytes of a line without an end after which only what is written to the file later is read."""
POLL_LIMIT = 32 << 20
"""Bytes after which a poll leaves the remaining files to the next poll."""
MOST_WAITING = 8 << 20
"""Bytes of events that a writer keeps in memory while they cannot be written."""
OUTLINE_BYTES = 2 << 10
"""Bytes at the end of a long file that its outline includes, besides the first line."""
OUTLINE_LINES = 4
"""Minimum lines at the end of a long file in its outline, even beyond `OUTLINE_BYTES`."""
FILES_PER_POLL = 256
"""Files of ranks other than 0 that one poll of an outline rereads, in rotation."""

_WORKER_FILE = re.compile(r"rank(\d{5,7})-attempt(\d{4,7})\.jsonl")
_LAUNCHER_FILE = re.compile(r"(launcher|uploads|node\d{5,7})\.jsonl")
_FROM_TEXT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventWriter:
    """Appends events to one file, each with a single write so that lines never interleave.

    Nothing is raised: events that cannot be written (for example on a full disk) wait in memory and
    are written with a later one. Those that do not find room there are counted in `dropped`, the
    oldest first. A warning on stderr announces that the first one waits.

    Threads may share a writer.
    """

    def __init__(self, path: Path | str, *, inside: Path | None = None) -> None:
        """`inside`: the run's folder, below which no links are followed; None: the file's own."""
        self.path = Path(path)
        self._inside = inside or self.path.parent
        self.dropped = 0
        self._writing = threading.RLock()
        """Held by the thread that writes; a signal may interrupt it and write, too."""
        self._handle: int | None = None
        self._waiting = deque[bytes]()
        """Lines that are not written yet, the first perhaps in part."""
        self._torn = False
        """Whether the file ends within a line, so that the next event must start a new one."""
        self._is_cut = False
        """Whether the file ends within the line whose rest is the first of those that wait."""
        self._warned = False

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: EventKind) -> None:
        """Append one event; its `t` is the current time."""
        self.write_record(event.KIND, **event.fields())

    def write_record(self, kind: str, **fields: Any) -> None:
        """Append one event of any kind; its `t` is the current time unless given in `fields`."""
        texts = {k: shortened(v, MOST_WRITTEN) for k, v in fields.items() if isinstance(v, str)}
        line = encode({"t": time.time(), "kind": kind, **fields, **texts})
        with self._writing:
            self._waiting.append(line)
            try:
                self._write_waiting()
            except OSError as error:
                self._keep_newest(error)

    def close(self) -> None:
        """Close the file, after another try to write what waits."""
        with self._writing, contextlib.suppress(OSError):
            if self._waiting:
                self._write_waiting()
        with self._writing, contextlib.suppress(OSError):
            handle, self._handle = self._handle, None
            if handle is not None:
                os.close(handle)

    def _write_waiting(self) -> None:
        if self._handle is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._handle = open_inside(self._inside, self.path, flags)
            self._torn = _ends_inside_a_line(self._handle)
        ending = b"\n" if self._torn else b""
        text = ending + b"".join(self._waiting)
        written = os.write(self._handle, text)
        self._torn = self._torn and not written
        left = max(written - len(ending), 0)
        while self._waiting and left >= len(self._waiting[0]):
            left -= len(self._waiting.popleft())
            self._is_cut = False
        if left:
            self._waiting[0], self._is_cut = self._waiting[0][left:], True
        if self._waiting:
            raise OSError(f"only {written} of {len(text)} bytes were written")

    def _keep_newest(self, error: OSError) -> None:
        """Drop what there is no room for in memory, and say once that events wait."""
        while sum(map(len, self._waiting)) > MOST_WAITING:
            self._waiting.popleft()
            self._torn, self._is_cut = self._torn or self._is_cut, False
            self.dropped += 1
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Exception):  # stderr may be on the same full disk
                print(
                    f"warning: {self.path}: events cannot be written ({error}); training goes on",
                    file=sys.stderr,
                    flush=True,
                )


class EventReader:
    """Reads the events that were added to a run's files since the last `poll`."""

    def __init__(
        self, rundir: RunDir, *, ranks: Collection[int] | None = None, outline: bool = False
    ) -> None:
        """`ranks` limits which workers' files are read; the launchers' files always are.

        With `outline`, only the beginning and the end of long files of ranks other than 0 are read,
        so that a run of a thousand ranks opens in seconds. Events added later are read in full, but
        with many ranks not at every poll.
        """
        self.skipped = 0
        """Number of lines that were not events."""
        self.behind = False
        """Whether the last poll stopped at its memory limit and more can be read now."""
        self._rundir, self._ranks, self._outline = rundir, ranks, outline
        self._offsets: dict[str, int] = {}
        self._polls = 0

    def poll(self) -> list[Event]:
        """Return new events, by time across files and in written order within each file.

        Memory is bounded: after a long run, poll again while `behind` to read everything.
        """
        batches: list[list[Event]] = []
        num_bytes, self.behind = 0, False
        for path, rank, attempt in self._due():
            if num_bytes >= POLL_LIMIT:
                self.behind = True
                break
            chunk = self._take(path, outline=self._outline and rank not in (None, 0))
            num_bytes += len(chunk)
            if chunk:
                batches.append(self._parse(chunk, rank, attempt))
        return list(heapq.merge(*batches, key=lambda event: event.t))

    def drain(self) -> list[Event]:
        """Return all new events, however many: polls until nothing is left."""
        events = self.poll()
        while self.behind:
            events += self.poll()
        return events

    def skip_to_end(self) -> None:
        """Skip everything written so far, as if it had been read."""
        for path, _, _ in event_files(self._rundir, ranks=self._ranks):
            with (
                contextlib.suppress(OSError),
                open(path, "rb", buffering=0, opener=self._rundir.open) as file,
            ):
                size = at = os.fstat(file.fileno()).st_size
                first = max(0, size - LINE_LIMIT)
                self._offsets[path.name] = size if first else 0
                while at > first:
                    start = max(0, at - OUTLINE_BYTES)
                    end = os.pread(file.fileno(), at - start, start).rfind(b"\n")
                    at = start
                    if end >= 0:
                        self._offsets[path.name] = start + end + 1
                        break

    def _due(self) -> list[tuple[Path, int | None, int | None]]:
        """Return the files that this poll has to look at."""
        files = list(event_files(self._rundir, ranks=self._ranks))
        self._polls += 1
        num_turns = 1 + len(files) // FILES_PER_POLL if self._outline else 1
        return [
            file
            for index, file in enumerate(files)
            if file[1] in (None, 0)
            or (index + self._polls) % num_turns == 0
            or file[0].name not in self._offsets
        ]

    def _take(self, path: Path, *, outline: bool) -> bytes:
        """Return the complete lines after those already read."""
        try:
            with open(path, "rb", buffering=0, opener=self._rundir.open) as file:
                size = os.fstat(file.fileno()).st_size
                if outline and path.name not in self._offsets and size > 2 * OUTLINE_BYTES:
                    return self._take_outline(file, path.name, size)
                return self._take_rest(file, path.name, size)
        except OSError:  # the run is being deleted, or the filesystem fails for now
            return b""

    def _take_rest(self, file: FileIO, name: str, size: int) -> bytes:
        start = self._offsets.get(name, 0)
        chunk = os.pread(file.fileno(), max(0, min(LINE_LIMIT, size - start)), start)
        full = len(chunk) == LINE_LIMIT
        self.behind = self.behind or full
        end = chunk.rfind(b"\n") + 1
        if full and not end:  # no event is that long
            self.skipped += 1
            end = self._end_of_line(file, start + len(chunk), size) - start
            chunk = b""
        self._offsets[name] = start + end
        return chunk[:end]

    def _end_of_line(self, file: FileIO, start: int, size: int) -> int:
        """Return the end of the line that goes on at `start`; the file's end for an endless one."""
        for at in range(start, min(size, start + MOST_PASSED_OVER), LINE_LIMIT):
            found = os.pread(file.fileno(), LINE_LIMIT, at).find(b"\n")
            if found >= 0:
                return at + found + 1
        return size

    def _take_outline(self, file: FileIO, name: str, size: int) -> bytes:
        """Return the first line and the last ones."""
        length = OUTLINE_BYTES
        while length < min(size, LINE_LIMIT):
            last = os.pread(file.fileno(), length, size - length)
            if last.count(b"\n") > OUTLINE_LINES:
                first = os.pread(file.fileno(), OUTLINE_BYTES, 0)
                begin, end = last.find(b"\n") + 1, last.rfind(b"\n") + 1
                self._offsets[name] = size - length + end
                return first[: first.find(b"\n") + 1] + last[begin:end]
            length *= 4  # a traceback may be long
        return self._take_rest(file, name, size)

    def _parse(self, chunk: bytes, rank: int | None, attempt: int | None) -> list[Event]:
        lines = [line for line in chunk.split(b"\n") if line.strip()]
        events = [decode(line, rank=rank, attempt=attempt) for line in lines]
        found = [event for event in events if event is not None]
        self.skipped += len(lines) - len(found)
        return found


def read(path: Path | str, opener: Opener = regular) -> list[Event]:
    """Return all events of a file, without an incomplete last line and invalid lines."""
    path = Path(path)
    match = _WORKER_FILE.fullmatch(path.name)
    rank, attempt = (int(match[1]), int(match[2])) if match else (None, None)
    events = (decode(line, rank=rank, attempt=attempt) for line in lines_of(path, opener))
    return [event for event in events if event is not None]


def lines_of(path: Path, opener: Opener = regular) -> Iterator[bytes]:
    """Yield the complete lines of a file, up to one that is longer than `LINE_LIMIT`."""
    with open(path, "rb", opener=opener) as file:
        while (line := file.readline(LINE_LIMIT)).endswith(b"\n"):
            yield line


def event_files(
    rundir: RunDir, *, ranks: Collection[int] | None = None
) -> Iterator[tuple[Path, int | None, int | None]]:
    """Yield (file, rank, attempt) of every event file, the launchers' files first."""
    try:
        names = sorted(os.listdir(rundir.events))
    except OSError:
        return
    for name in names:
        match = _WORKER_FILE.fullmatch(name)
        if match is None and _LAUNCHER_FILE.fullmatch(name):
            yield rundir.events / name, None, None
        elif match is not None and (ranks is None or int(match[1]) in ranks):
            yield rundir.events / name, int(match[1]), int(match[2])


def encode(record: dict[str, Any]) -> bytes:
    """Return one line of valid JSON; values that JSON cannot represent become strings."""
    try:
        text = json.dumps(record, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        text = json.dumps(json_safe(record), default=str, separators=(",", ":"))
    return text.encode() + b"\n"


def decode(line: bytes, *, rank: int | None = None, attempt: int | None = None) -> Event | None:
    """Return the event in `line`, or None if there is none."""
    try:
        record = from_json(line)
        kind, t = record.pop("kind"), float(record.pop("t"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if not isinstance(kind, str) or not math.isfinite(t):
        return None
    if b'nan"' in line or b'inf"' in line:
        record = _with_floats(record)
    return Event(kind=kind, t=t, rank=rank, attempt=attempt, fields=record)


def json_safe(value: Any) -> Any:
    """Return `value` with every non-finite float replaced by a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def _with_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _FROM_TEXT.get(value, value)
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


def _ends_inside_a_line(handle: int) -> bool:
    """Whether an earlier writer was cut off in the middle of its last line."""
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"
