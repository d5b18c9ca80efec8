"""Watches whether the run's folder takes what is written to it: a full disk, or a folder gone.

Ranks go on where it does not: their events wait in memory, and a save that fails is left. Nothing
that they write can tell of it, so the launcher does.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import dataclass, field

from colotrain.errors import one_line
from colotrain.rundir import RunDir, open_inside

PROBE_S = 5.0
"""Seconds between two looks."""
PROBE_BYTES = 4096
LASTING = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOENT)
"""Errors of a folder to which heartbeats cannot be written, either, and that rarely go by."""


@dataclass(slots=True, kw_only=True)
class FolderWatch:
    """Tells when the run's folder cannot be written, and when it can again."""

    rundir: RunDir
    error: OSError | None = None
    """Why it cannot be written now."""
    since: float = 0.0
    """Monotonic time at which that was noticed."""
    looked_at: float = field(default_factory=time.monotonic)

    @property
    def problem(self) -> str:
        """Return one clause on why it cannot be written; empty if it can."""
        if self.error is None:
            return ""
        why = os.strerror(self.error.errno or 0)
        if self.error.errno == errno.ENOENT:
            why = "it was renamed or deleted"
        return f"{self.rundir.path} cannot be written ({why})"

    @property
    def lasts(self) -> bool:
        """Whether it is not for want of room, for which a run can wait."""
        return self.error is not None and self.error.errno in LASTING

    def check(self) -> None:
        """Look every few seconds; call often."""
        now = time.monotonic()
        if now - self.looked_at < PROBE_S:
            return
        self.looked_at, before = now, self.error
        self.look()
        if self.error is not None and before is None:
            self.since = now
            _warn(f"{self.problem}: training goes on, and nothing of it is shown or saved")
        elif self.error is None and before is not None:
            _warn(f"{self.rundir.path} can be written again, after {now - self.since:.0f} s")

    def look(self) -> None:
        """Find out now whether the folder can be written."""
        probe = self.rundir.stop_file.with_name(f".{os.getpid()}")
        try:
            handle = open_inside(self.rundir.path, probe, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(handle, bytes(PROBE_BYTES))
            finally:
                os.close(handle)
                probe.unlink()
            self.error = None
        except OSError as error:
            self.error = error


def _warn(text: str) -> None:
    """Print a warning: an event would not be written."""
    print(one_line(f"warning: {text}"), file=sys.stderr, flush=True)
