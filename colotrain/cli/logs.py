"""`colotrain logs`: print the output of a run's workers, detached launcher and job."""

from __future__ import annotations

import sys
import time

from colotrain.events.fold import follow
from colotrain.events.liveness import find, state
from colotrain.rundir import RUNS, RunDir
from colotrain.schedulers.queue import job_log
from colotrain.show.console import print_json
from colotrain.show.logs import Lines, sources

POLL_S = 0.5


def _has_logs(rundir: RunDir) -> bool:
    return rundir.launcher_log.exists() or any(rundir.events.glob("rank*"))


def logs(
    run: str | None,
    *,
    follows: bool = False,
    rank: int | None = None,
    lines: int = 40,
    as_json: bool = False,
) -> int:
    """Print the last lines of every log; with `follows`, continue until the run has ended."""
    rundir = find(run, root=RUNS, counts=_has_logs)
    found = {
        source.name: Lines(source) for source in sources(rundir, job_log=job_log(rundir), rank=rank)
    }
    last = [line for reader in found.values() for line in reader.last(lines)]
    if as_json:
        rows = [{"from": name, "file": str(r.source.path)} for name, r in found.items()]
        print_json({"run": rundir.name, "logs": rows, "lines": last})
        return 0
    for line in last:
        print(line)
    if not found and not follows:
        print(f"{rundir.name}: nothing was printed yet", file=sys.stderr)
    while follows:
        ended = state(rundir, follow(rundir, ranks={0})) not in ("starting", "running")
        if ended:
            time.sleep(POLL_S)  # the launcher prints how the run ended after its last event
        for source in sources(rundir, job_log=job_log(rundir), rank=rank):
            known = found.get(source.name)
            if known is None or known.source != source:
                found[source.name] = Lines(source)
        for reader in found.values():
            for line in reader.more():
                print(line, flush=True)
        if ended:
            return 0
        time.sleep(POLL_S)
    return 0
