"""The process beside a launcher that copies its run to an object store while the run trains.

It follows the run's folder, and sends finished checkpoints, the manifest last, and the small files
that changed. It has a low priority (`nice`), ends with its launcher, and can be started again at
any time: what is in the store already is not sent again. Started as
`python -m colotrain.runs.uploader RUN_DIR RUNS_DIR KEEP LAUNCHER_PID`; the end of its standard
input asks it to send what is left and end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from colotrain.engine.state.manifest import (
    MANIFEST,
    Manifest,
    checksum_of,
    complete,
    names_to_keep,
    read_manifest,
)
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter
from colotrain.parent_process import die_with
from colotrain.rundir import RunDir
from colotrain.runs.store import FILES_AT_ONCE, Store, Stored
from colotrain.runs.sync_state import (
    SyncState,
    committed,
    is_plain,
    small_files,
    version_of,
    version_of_content,
)

POLL_S = 1.0
SMALL_S = 5.0
"""Least seconds between two uploads of a small file."""
SHARE = 10.0
"""A small file's next upload waits this many times as long as its last one took."""
ALIVE_S = 30.0
"""Seconds after which the launcher's file is sent again, as a sign that the run is alive."""
LATE_S = 60.0
"""Seconds that sending a checkpoint may take before a warning says that a newer one waits."""
TELL_S = 600.0
"""Seconds between two warnings of one kind."""
PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Seconds before another try after the first, second, … failure; the last for all further ones."""
NICE = 10


class Replaced(ColotrainError):
    """Another launcher, or another run, has the place in the store; nothing more may be sent."""


@dataclass(slots=True)
class Uploader:
    """Sends one run. `send_checkpoints` and `send_small` may run at once, in two threads."""

    rundir: RunDir
    store: Store
    keep: int = 2
    ending: threading.Event = field(default_factory=threading.Event)
    synced: SyncState = field(init=False)
    events: EventWriter = field(init=False)
    damaged: set[str] = field(default_factory=set)
    sending: tuple[str, float] | None = None
    """Name of the checkpoint that is being sent, and since when."""
    pruned: bool = False
    """Whether checkpoints that the run has set aside were deleted from the store."""
    plan_checked: bool = False
    """Whether the plan in the store was seen to be that of this run."""
    told_at: dict[str, float] = field(default_factory=dict)
    due_at: dict[str, float] = field(default_factory=dict)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.synced = SyncState(self.rundir, self.store.address)
        self.events = EventWriter(self.rundir.upload_events, inside=self.rundir.path)

    def send_checkpoints(self) -> None:
        """Send the newest checkpoint, and the best, that the store lacks; delete older ones."""
        self.check_plan()
        if not self.pruned:
            self._prune_at_start()
        while (folder := next_checkpoint(self.rundir, self.synced, self.damaged)) is not None:
            self.sending = folder.name, time.monotonic()
            try:
                self._send_checkpoint(folder)
            finally:
                self.sending = None
                shutil.rmtree(self.rundir.sending, ignore_errors=True)

    def _prune_at_start(self) -> None:
        """Delete checkpoints of later steps than the run goes on from: they are set aside here."""
        for folder in complete(self.rundir.checkpoints)[:1]:
            self._prune(folder.name, best=read_manifest(folder).best_step)
        self.pruned = True

    def _send_checkpoint(self, published: Path) -> None:
        folder = self._hold(published)
        if folder is None:
            return  # it was deleted, so there is a newer one
        name, sealed = folder.name, (folder / MANIFEST).read_bytes()
        manifest = read_manifest(folder)
        inside = f"checkpoints/{name}"
        stored = self.store.objects(inside)
        there = {file: stored.get(f"{inside}/{file}") for file in manifest.files}
        missing = [file for file in there if not self._is_there(manifest, name, file, there[file])]
        other = stored.get(f"{inside}/{MANIFEST}")  # another state of the same step
        if missing and other is not None:
            if not self.synced.is_own(f"{inside}/{MANIFEST}", other):
                self.damaged.add(name)
                where = f"{self.store.address}/{inside}"
                self.tell(f"{name} is not sent: {where} was not sent from here", kind=name)
                return
            self.store.delete([f"{inside}/{MANIFEST}"])
        self.synced.begin(f"{inside}/{file}" for file in (*missing, MANIFEST) if missing)

        def send(file: str) -> None:
            entry = manifest.files[file]
            if not is_plain(self.rundir, folder / file):
                raise _Damaged(f"{published / file}: is no regular file of the checkpoint")
            with self._open(folder / file) as source:
                if checksum_of(source) != entry.xxh128:
                    raise _Damaged(f"{published / file}: its content is not what was written")
                source.seek(0)
                sent = self.store.send(source, f"{inside}/{file}")
            self.synced.set(f"{inside}/{file}", sent, entry.xxh128)

        try:
            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                list(pool.map(send, missing))
        except _Damaged as error:
            self.damaged.add(name)
            self.tell(f"{name} is not sent: {error}", kind=name)
            return
        self.send_small(all_now=True)  # what led to the checkpoint is there before it counts
        with self.one_at_a_time:
            self.check_owner()
        sent = self.store.write(f"{inside}/{MANIFEST}", sealed)
        self.synced.set(f"{inside}/{MANIFEST}", sent, version_of_content(sealed))
        self._prune(name, best=manifest.best_step)

    def _hold(self, published: Path) -> Path | None:
        """Return a copy by hard links, which stays while the run deletes the original."""
        held = self.rundir.sending / published.name
        shutil.rmtree(self.rundir.sending, ignore_errors=True)
        self.rundir.make_folder(held)
        try:
            for file in published.iterdir():
                os.link(file, held / file.name, follow_symlinks=False)
            read_manifest(held)
        except (FileNotFoundError, ColotrainError):
            return None
        except OSError:  # a filesystem without hard links
            return published
        return held

    def _is_there(self, manifest: Manifest, name: str, file: str, stored: Stored | None) -> bool:
        key, entry = f"checkpoints/{name}/{file}", manifest.files[file]
        same = self.synced.has(key, entry.xxh128) and self.synced.is_current(key, stored)
        return same and stored is not None and stored.bytes == entry.bytes

    def _prune(self, newest: str, *, best: int | None) -> None:
        """Delete what the run deletes here, manifests first, and remains of unfinished uploads."""
        stored = self.store.objects("checkpoints")
        known = committed(stored)
        if newest not in known:
            return
        latest = [path.name for path in complete(self.rundir.checkpoints)[:1]]
        if latest and latest[0] in known:  # `newest` may be the best one, sent after the newest
            newest = latest[0]
        kept = names_to_keep(known, keep=self.keep, newest=newest, best=best)
        names = {*stored, *self.synced.begun()}  # a torn upload may have left no object
        gone = [name for name in names if name.split("/")[1] not in kept]
        gone = [name for name in gone if self.synced.is_own(name, stored.get(name))]
        gone.sort(key=lambda name: not name.endswith(f"/{MANIFEST}"))
        self.store.delete(gone)
        self.synced.drop(*gone)

    def send_small(self, *, all_now: bool = False) -> None:
        """Send the small files that have changed, each not too often unless `all_now`."""
        with self.one_at_a_time:
            self._send_small(all_now=all_now)

    def _send_small(self, *, all_now: bool) -> None:
        self.check_plan()
        now = time.monotonic()
        names = list(small_files(self.rundir))
        names = [name for name in names if all_now or now >= self.due_at.get(name, 0.0)]
        if "launcher.json" in names:
            self.check_owner()
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(self._send_one, names))
        if not self.rundir.launcher_file.exists() and self.synced.get("launcher.json"):
            if self.synced.is_own("launcher.json", self.store.about("launcher.json")):
                self.store.delete(["launcher.json"])
            self.synced.drop("launcher.json")

    def _send_one(self, name: str) -> None:
        """Send a small file that has changed; the launcher's in any case: the run is alive."""
        began, file = time.monotonic(), self.rundir.path / name
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            version = version_of(file)
            is_launcher = name == "launcher.json"
            if self.synced.has(name, version) and not is_launcher:
                return
            with self._open(file) as source:
                self.synced.set(name, self.store.send(source, name), version)
            took_s = time.monotonic() - began
            least_s = ALIVE_S if is_launcher else SMALL_S
            self.due_at[name] = time.monotonic() + max(least_s, SHARE * took_s)

    def _open(self, file: Path) -> BufferedReader:
        """Open a file of the run for reading, without following links."""
        return os.fdopen(self.rundir.open(file, os.O_RDONLY), "rb")

    def check_plan(self) -> None:
        """Raise `Replaced`, before anything is sent, if the store has another run's plan."""
        if self.plan_checked:
            return
        stored = self.store.about("plan.json")
        is_known = stored is None or self.synced.is_current("plan.json", stored)
        if not (is_known or self._is_as_here("plan.json", stored)):
            problem = f"{self.store.address}/plan.json: was neither sent nor fetched from here"
            raise Replaced(f"{problem}; nothing is sent to it")
        self.plan_checked = True

    def check_owner(self) -> None:
        """Raise `Replaced` if another launcher has written to the store since this one did."""
        entry, stored = self.synced.get("launcher.json"), self.store.about("launcher.json")
        if entry is None or stored is None or stored.token == entry.token:
            return
        if not self._is_as_here("launcher.json", stored):  # unless only the answer was lost
            raise Replaced(f"another launcher has {self.store.address}; nothing more is sent to it")

    def _is_as_here(self, name: str, stored: Stored | None) -> bool:
        """Whether an object has the content of the run's file of that name."""
        with suppress(FileNotFoundError), self._open(self.rundir.path / name) as own:
            size = os.fstat(own.fileno()).st_size
            is_same_size = stored is not None and stored.bytes == size
            return is_same_size and own.read() == self.store.read(name)
        return False

    def tell(self, text: str, *, kind: str) -> None:
        """Record a warning, of one kind not more often than every `TELL_S`."""
        now = time.monotonic()
        if now >= self.told_at.get(kind, -TELL_S) + TELL_S:
            self.told_at[kind] = now
            self.events.write(Note(text=f"warning: {text}"))

    def tell_if_late(self) -> None:
        """Record that a checkpoint is still being sent while there is a newer one."""
        sending, latest = self.sending, complete(self.rundir.checkpoints)
        if sending is None or not latest or latest[0].name <= sending[0]:
            return
        seconds = time.monotonic() - sending[1]
        if seconds > LATE_S:
            text = f"{sending[0]} is being sent to {self.store.address} since {seconds:.0f} s"
            self.tell(f"{text}; {latest[0].name} waits, training goes on", kind="late")

    def repeat(self, action: Callable[[], None], *, over: Callable[[], bool], kind: str) -> None:
        """Repeat `action` until it has succeeded once after `over` was true."""
        failures = 0
        while True:
            last = over()
            try:
                action()
                if last:
                    return
                failures = 0
                self.ending.wait(POLL_S)
            except Replaced as error:
                self.synced.fail(error.problem)
                self.tell(error.problem, kind="replaced")
                return
            except (ColotrainError, OSError) as error:
                problem = error.problem if isinstance(error, ColotrainError) else str(error)
                self.synced.fail(problem)
                self.tell(f"{problem}; it is tried again", kind=kind)
                pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
                if self.ending.wait(pause_s):
                    time.sleep(PAUSES_S[0])
                failures += 1

    def work(self) -> None:
        """Send the run until `ending` is set and everything is there."""
        checkpoints = threading.Thread(
            target=self.repeat,
            args=(self.send_checkpoints,),
            kwargs={"over": self.ending.is_set, "kind": "checkpoints"},
            daemon=True,
        )
        checkpoints.start()

        def over() -> bool:
            if self.ending.is_set():
                checkpoints.join(POLL_S)
            return not checkpoints.is_alive()

        def small() -> None:
            self.tell_if_late()
            self.send_small(all_now=not checkpoints.is_alive())

        self.repeat(small, over=over, kind="small")
        checkpoints.join()


class _Damaged(Exception):
    pass


def next_checkpoint(rundir: RunDir, synced: SyncState, damaged: set[str]) -> Path | None:
    """Return the checkpoint to send next: the newest, then the best evaluation's; None: neither."""
    known = [path for path in complete(rundir.checkpoints) if path.name not in damaged]
    for index, folder in enumerate(known):
        with suppress(OSError, ColotrainError):
            version = version_of_content((folder / MANIFEST).read_bytes())
            is_best = read_manifest(known[0]).best_step == read_manifest(folder).step
            there = synced.has(f"checkpoints/{folder.name}/{MANIFEST}", version)
            if (index == 0 or is_best) and not there:
                return folder
    return None


def main(path: str, runs_dir: str, keep: int, launcher: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are the launcher's to handle
    die_with(launcher)
    os.nice(NICE)
    rundir = RunDir(path)
    with rundir.append(rundir.store_lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an older one may still be sending
        uploader = Uploader(rundir, Store(runs_dir, rundir.name), keep=keep)

        def wait_for_end() -> None:
            sys.stdin.read()
            uploader.ending.set()

        threading.Thread(target=wait_for_end, name="end", daemon=True).start()
        uploader.work()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
