"""Fetches runs from object stores into their folders under ./runs, where they are read or resumed.

A file that is here already as it is in the store is not fetched again. A run that is being sent
from its folder here is never fetched: the folder is newer than the store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from colotrain.config.stores import check_address, is_address
from colotrain.engine.state.manifest import (
    MANIFEST,
    complete,
    damage,
    publish,
    read_manifest,
)
from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.rundir import (
    MOST_READ,
    RUNS,
    RunDir,
    check_room,
    replacement_of,
    run_name,
    write_atomically,
)
from colotrain.runs.store import FILES_AT_ONCE, Store, Stored, StoreError
from colotrain.runs.sync_state import (
    SMALL,
    SyncState,
    committed,
    version_of,
    version_of_content,
)
from colotrain.show.console import tell

REFRESH_S = 5.0
"""Seconds between two looks at the store while a run is followed."""
PLANS = ("plan.json", "config.yaml", "signature.json")
OUTLINE = (*PLANS[:2], "summary.json", "launcher.json", "events/launcher.jsonl", "events/node*")
GRADIENTS = (*OUTLINE, "events/rank00000-*.jsonl")
ALL = tuple(glob for glob in SMALL if not glob.startswith("logs"))
LONG = {".jsonl": 4 << 30, ".safetensors": 1 << 40}
"""Maximum bytes of files that are fetched in parts, by ending; others have at most `MOST_READ`."""


def fetch_to_resume(rundir: RunDir, runs_dir: str | None, *, overwrite: bool = False) -> None:
    """Fetch what a run in a store has and this machine lacks, so that it goes on from there.

    Raises `StoreError` if the store cannot be read and written.
    """
    if runs_dir is None or is_sent_from_here(rundir):  # its live launcher is refused later
        return
    Store(runs_dir, rundir.name).check_writable()
    run = StoredRun(rundir, runs_dir)
    if not run.exists:
        return
    if overwrite:
        problem = f"--overwrite: {run.store.address} exists, and stores rename nothing"
        raise UsageError(problem, "choose another name, or delete it there")
    run.check_same()
    run.fetch_small(ALL)
    run.fetch_checkpoint()


def fetch_if_address(
    name: str | None,
    *,
    wanted: Sequence[str] = ALL,
    checkpoint: bool = False,
    step: int | None = None,
) -> str | None:
    """Return a run's name under ./runs, where a run that is given by its address is fetched first.

    `wanted`: globs of the small files to fetch. `checkpoint`: whether to fetch the checkpoint of
    `step`, by default the newest, too.
    """
    if name is None or not is_address(name):
        return name
    rundir, runs_dir = _place(name)
    if is_sent_from_here(rundir):
        return rundir.name
    run = _existing(rundir, runs_dir)
    run.check_same()
    run.fetch_small(wanted)
    if checkpoint:
        run.fetch_checkpoint(step)
    return rundir.name


def runs_dir_of(name: str | None) -> dict[str, str]:
    """Return the setting `runs_dir` that a run's address stands for; nothing for a name."""
    return {"runs_dir": _place(name)[1]} if name is not None and is_address(name) else {}


@contextmanager
def followed(name: str | None, *, follow: bool = True) -> Iterator[str | None]:
    """As `fetch_if_address`, and fetch what is new every `REFRESH_S` inside the context."""
    found, over = fetch_if_address(name), threading.Event()
    if name is None or not follow or not is_address(name):
        yield found
        return

    def refresh() -> None:
        rundir, runs_dir = _place(name)
        while not over.wait(REFRESH_S):
            if not is_sent_from_here(rundir):
                with suppress(ColotrainError, OSError):
                    StoredRun(rundir, runs_dir).fetch_small(ALL)

    thread = threading.Thread(target=refresh, name="store", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()


@contextmanager
def outlines(runs_dir: str) -> Iterator[Path]:
    """Yield a temporary folder with what `colotrain runs` needs of all runs of a store."""
    _check(runs_dir)
    with tempfile.TemporaryDirectory(prefix="colotrain-runs-") as folder:

        def fetch(name: str) -> None:
            try:
                run = StoredRun(RunDir(Path(folder) / name), runs_dir)
                if run.exists:
                    run.fetch_small(OUTLINE if "summary.json" in run.objects else GRADIENTS)
            except StoreError as error:
                tell(f"warning: {error.problem}")

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(fetch, filter(is_name, Store(runs_dir).folders())))
        yield Path(folder)


def stored_checkpoints(address: str, *, whole: bool) -> Iterator[Path]:
    """Yield temporary folders with a stored run's checkpoints, newest first, each until the next.

    Without `whole` the manifest is fetched, and other files are empty ones of the stored size.
    """
    place, runs_dir = _place(address)
    run = _existing(place, runs_dir)
    inside: dict[str, list[str]] = {}
    for name in run.objects:
        if _is_wanted(name, ("checkpoints/step-*/*",)):
            inside.setdefault(name.split("/")[1], []).append(name)
    for checkpoint in sorted(inside, reverse=True):
        with tempfile.TemporaryDirectory(prefix="colotrain-checkpoint-") as folder:
            (path := Path(folder) / checkpoint).mkdir()
            for name in inside[checkpoint]:
                file = path / PurePosixPath(name).name
                if file.name == MANIFEST:
                    file.write_bytes(run.read(name))
                elif whole:
                    run.store.fetch(name, file)
                else:
                    file.touch()
                    os.truncate(file, run.objects[name].bytes)
            yield path


def is_name(name: str) -> bool:
    return run_name(name) == name


def is_sent_from_here(rundir: RunDir) -> bool:
    """Whether a process sends the run from this very folder, which is newer than the store then."""
    try:
        with os.fdopen(rundir.open(rundir.store_lock, os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _place(address: str) -> tuple[RunDir, str]:
    """Return the folder under ./runs of a run at an address, and the address without its name."""
    _check(address)
    runs_dir, _, name = address.rstrip("/").rpartition("/")
    if not name or not is_name(name) or runs_dir.endswith(":/"):
        raise UsageError(f"{address}: expected a run's address", "as in s3://bucket/path/NAME")
    return RunDir(RUNS / name), runs_dir


def _existing(rundir: RunDir, runs_dir: str) -> StoredRun:
    """Return a run in a store; `UsageError` if it is not there."""
    run = StoredRun(rundir, runs_dir)
    if not run.exists:
        known = ", ".join(Store(runs_dir).folders()[:20]) or "none"
        raise UsageError(f"no run {rundir.name!r} in {runs_dir}", f"there are: {known}")
    return run


def _check(address: str) -> None:
    if problems := list(check_address(address)):
        raise ConfigError(problems)


class StoredRun:
    """A run in a store as it was when this was made, and its folder on this machine."""

    def __init__(self, rundir: RunDir, runs_dir: str) -> None:
        self.rundir, self.runs_dir = rundir, runs_dir
        self.store = Store(runs_dir, rundir.name)
        self.synced = SyncState(rundir, self.store.address)
        self.objects = self.store.objects()

    @property
    def exists(self) -> bool:
        return "plan.json" in self.objects

    def check_same(self) -> None:
        """Refuse to write into the folder of another run of the same name."""
        if not self.rundir.plan_file.is_file():
            return
        own, runs_dir = self.rundir.plan().runs_dir, self.runs_dir
        if own is None or own.rstrip("/") != runs_dir.rstrip("/"):
            problem = f"{self.rundir.path}: is another run than the one in {runs_dir}"
            raise UsageError(problem, "work in another folder, or move it away")

    def fetch_small(self, wanted: Sequence[str]) -> None:
        """Fetch small files, by globs, that are newer in the store; they get the store's times."""
        self.rundir.create()

        def fetch(name: str) -> None:
            with suppress(StoreError):  # it was deleted meanwhile; `plan.json` is missed below
                self._fetch_one(name, self.objects[name])

        names = [name for name in self.objects if _is_wanted(name, wanted)]
        names = [name for name in names if not self._is_here(name)]
        for name in names:
            self._check_size(name)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(fetch, names))
        launcher_file, alive = self.rundir.launcher_file, self.objects.get("launcher.json")
        if alive and launcher_file.is_file():
            os.utime(launcher_file, (alive.modified_at, alive.modified_at))
        if not self.rundir.plan_file.is_file():
            raise StoreError(f"{self.store.address}/plan.json: cannot be read", "try again")
        if alive is None and self.synced.get("launcher.json"):
            launcher_file.unlink(missing_ok=True)
            self.synced.drop("launcher.json")

    def read(self, name: str) -> bytes:
        """Return a file whole; `StoreError` if it has too many bytes."""
        self._check_size(name)
        return self.store.read(name)

    def _check_size(self, name: str) -> None:
        """Raise `StoreError` for more bytes than are read of such a file."""
        size, most = self.objects[name].bytes, LONG.get(Path(name).suffix, MOST_READ)
        if size > most:
            problem = f"{self.store.address}/{name}: has {size >> 20} MiB"
            raise StoreError(f"{problem}: expected at most {most >> 20} MiB", "look at it")

    def _is_here(self, name: str) -> bool:
        is_current = self.synced.is_current(name, self.objects[name])
        return is_current and (self.rundir.path / name).is_file()

    def _fetch_one(self, name: str, stored: Stored) -> None:
        file, entry = self.rundir.path / name, self.synced.get(name)
        lines = name.endswith(".jsonl")
        here = file.stat().st_size if file.is_file() else 0
        if lines and entry is not None and here == entry.bytes and stored.bytes > here > 0:
            with self.rundir.append(file) as out:
                out.writelines(self.store.parts(name, start=here, end=stored.bytes))
        elif file.suffix not in LONG:
            self.rundir.write(file, self.store.read(name))
        elif not (lines and here and self._begins_as_stored(file, name)):
            self.rundir.make_folder(file.parent)
            with replacement_of(file, inside=self.rundir.path) as out:
                out.writelines(self.store.parts(name, end=stored.bytes))
        if not lines or file.stat().st_size <= stored.bytes:
            if name != "summary.json":  # which is compared with times of this machine's clock
                os.utime(file, (stored.modified_at, stored.modified_at))
            self.synced.set(name, stored, version_of(file))

    def _begins_as_stored(self, file: Path, name: str) -> bool:
        """Whether a file here has all lines of the one in the store, and may have later ones."""
        size = self.objects[name].bytes
        with os.fdopen(self.rundir.open(file, os.O_RDONLY), "rb") as own:
            if os.fstat(own.fileno()).st_size < size:
                return False
            parts = self.store.parts(name, end=size)
            return all(part == own.read(len(part)) for part in parts)

    def fetch_checkpoint(self, step: int | None = None) -> None:
        """Fetch the newest intact checkpoint, or that of `step`, unless this machine has it."""
        known, address = committed(self.objects), self.store.address
        if step is not None:
            steps = ", ".join(str(_step_of(name)) for name in known)
            known = [name for name in known if _step_of(name) == step]
            if not known and not (self.rundir.checkpoint(step) / MANIFEST).is_file():
                raise UsageError(f"{address}: no checkpoint of step {step}", f"there are {steps}")
        here = {path.name for path in complete(self.rundir.checkpoints)}
        for name in known:
            if name in here or (step is None and here and name < max(here)):
                return
            inside = f"checkpoints/{name}/"
            needed = sum(one.bytes for path, one in self.objects.items() if path.startswith(inside))
            check_room(self.rundir.path, needed, "make room, or work in a folder on another disk")
            problem = self._fetch_and_publish(name)
            if problem is None:
                tell(f"fetched {name} from {address}")
                return
            tell(f"warning: {name} is passed over: {problem}")
        if known:
            raise StoreError(f"{address}: none of {len(known)} checkpoints is intact")

    def _fetch_and_publish(self, name: str) -> str | None:
        """Fetch a checkpoint, check it, and publish it; return what is wrong with it, or None."""
        folder, inside = self.rundir.checkpoints / f".{name}.fetched" / name, f"checkpoints/{name}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        self.rundir.make_folder(folder)
        try:
            sealed = self.read(f"{inside}/{MANIFEST}")
            write_atomically(folder / MANIFEST, sealed)
            files = read_manifest(folder).files
            if any(Path(file).name != file for file in files):
                return f"{inside}/{MANIFEST}: names files elsewhere"
            for file, entry in files.items():
                found = self.objects.get(f"{inside}/{file}")
                if found is None or found.bytes != entry.bytes:
                    return f"{inside}/{file}: is not there with its {entry.bytes:,} bytes"
            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                list(pool.map(lambda f: self.store.fetch(f"{inside}/{f}", folder / f), files))
            if problem := damage(folder):
                return problem
            publish(folder, self.rundir.checkpoint(_step_of(name)))
        except ColotrainError as error:
            return error.problem
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
        versions = {file: entry.xxh128 for file, entry in files.items()}
        for file, version in {**versions, MANIFEST: version_of_content(sealed)}.items():
            self.synced.set(f"{inside}/{file}", self.objects[f"{inside}/{file}"], version)
        return None


def _is_wanted(name: str, globs: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    return ".." not in path.parts and any(
        path.match(glob) and len(path.parts) == glob.count("/") + 1 for glob in globs
    )


def _step_of(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step-"))
