"""Runs in object stores, read here: what is needed of one is fetched into its folder under ./runs.

The folder is that in which the run trains, here or on another machine: `run` and `resume` go on
from what they fetch, and what is here already is not fetched again. A folder from
which a run is being sent is left as it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from colotrain.config.stores import check_address, is_address
from colotrain.engine.checkpoint.manifest import (
    MANIFEST,
    complete,
    damage,
    publish,
    read_manifest,
)
from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.rundir import RUNS, RunDir, run_name, write_atomically
from colotrain.runs.ledger import SMALL, Ledger, version_of, version_of_content
from colotrain.runs.store import FILES_AT_ONCE, Store, Stored, StoreError
from colotrain.spec.plan import RunPlan

REFRESH_S = 5.0
PLANS = ("plan.json", "config.yaml", "signature.json")
OUTLINE = (*PLANS[:2], "summary.json", "launcher.json", "events/launcher.jsonl", "events/node*")
GRADIENTS = (*OUTLINE, "events/rank00000-*.jsonl")
ALL = tuple(glob for glob in SMALL if not glob.startswith("logs"))


def bring(rundir: RunDir, runs_dir: str | None, *, overwrite: bool = False) -> None:
    """Fetch what a run in a store has and this machine lacks, so that it goes on from there.

    Raises `StoreError` if the store cannot be read and written.
    """
    if runs_dir is None or is_sent_from_here(rundir):  # its live launcher is refused later
        return
    store = store_of(runs_dir, rundir.name)
    store.check_writable()
    stored = store.objects()
    if "plan.json" not in stored:
        return
    if overwrite:
        problem = f"--overwrite: {store.address} exists, and stores rename nothing"
        raise UsageError(problem, "choose another name, or delete it there")
    _check_same(rundir, runs_dir)
    ledger = Ledger(rundir, store.address)
    fetch_small(store, ledger, rundir, stored, ALL)
    fetch_newest(store, ledger, rundir, stored)


def near(
    name: str | None,
    *,
    wanted: Sequence[str] = ALL,
    checkpoint: bool = False,
    step: int | None = None,
) -> str | None:
    """Return a run's name under ./runs; of a run at an address, after what is `wanted` is fetched.

    `checkpoint`: that of `step`, or the newest.
    """
    if name is None or not is_address(name):
        return name
    rundir, runs_dir = _place(name)
    if is_sent_from_here(rundir):
        return rundir.name
    store = store_of(runs_dir, rundir.name)
    stored = store.objects()
    if "plan.json" not in stored:
        known = Store(runs_dir).folders()
        raise UsageError(f"no run {name!r}", f"there are: {', '.join(known[:20]) or 'none'}")
    _check_same(rundir, runs_dir)
    ledger = Ledger(rundir, store.address)
    fetch_small(store, ledger, rundir, stored, wanted)
    if checkpoint:
        fetch_newest(store, ledger, rundir, stored, step=step)
    return rundir.name


@contextmanager
def followed(name: str | None, *, follow: bool = True) -> Iterator[str | None]:
    """Yield the run's name as `near` does, and fetch what is new every few seconds meanwhile."""
    found, over = near(name), threading.Event()
    if name is None or not follow or not is_address(name):
        yield found
        return

    def refresh() -> None:
        rundir, runs_dir = _place(name)
        store = store_of(runs_dir, rundir.name)
        while not over.wait(REFRESH_S):
            with suppress(ColotrainError, OSError):
                ledger = Ledger(rundir, store.address)
                fetch_small(store, ledger, rundir, store.objects(), ALL)

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
    store = Store(runs_dir.rstrip("/"))
    with tempfile.TemporaryDirectory(prefix="colotrain-runs-") as folder:

        def fetch(name: str) -> None:
            rundir, own = RunDir(Path(folder) / name), store_of(runs_dir, name)
            stored = own.objects()
            if "plan.json" not in stored:
                return
            wanted = OUTLINE if "summary.json" in stored else GRADIENTS
            fetch_small(own, Ledger(rundir, own.address), rundir, stored, wanted)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(fetch, filter(is_name, store.folders())))
        yield Path(folder)


def is_name(name: str) -> bool:
    return run_name(name) == name


def is_sent_from_here(rundir: RunDir) -> bool:
    """Whether a process sends the run from this very folder, which is newer than the store then."""
    try:
        with rundir.store_lock.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def store_of(runs_dir: str, name: str) -> Store:
    return Store(f"{runs_dir.rstrip('/')}/{name}")


def _place(address: str) -> tuple[RunDir, str]:
    """Return the folder under ./runs of a run at an address, and the address without its name."""
    _check(address)
    runs_dir, _, name = address.rstrip("/").rpartition("/")
    if not name or not is_name(name) or runs_dir.endswith(":/"):
        raise UsageError(f"{address}: expected a run's address", "as in s3://bucket/path/NAME")
    return RunDir(RUNS / name), runs_dir


def _check(address: str) -> None:
    if problems := list(check_address(address)):
        raise ConfigError(problems)


def _check_same(rundir: RunDir, runs_dir: str) -> None:
    """Refuse to write into the folder of another run of the same name."""
    if not rundir.plan_file.is_file():
        return
    own = rundir.plan().runs_dir
    if own is None or own.rstrip("/") != runs_dir.rstrip("/"):
        problem = f"{rundir.path}: is another run than the one in {runs_dir}"
        raise UsageError(problem, "work in another folder, or move it away")


def committed(stored: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints whose manifest is there, newest first."""
    found = (re.fullmatch(rf"checkpoints/(step-\d{{8,}})/{MANIFEST}", name) for name in stored)
    return sorted((match[1] for match in found if match), reverse=True)


def fetch_small(
    store: Store,
    ledger: Ledger,
    rundir: RunDir,
    stored: dict[str, Stored],
    wanted: Sequence[str],
) -> None:
    """Fetch the small files that are newer in the store; their time is that of the store."""
    rundir.create()

    def fetch(name: str) -> None:
        with suppress(StoreError):  # it was deleted meanwhile; `plan.json` is missed below
            _fetch_one(store, ledger, rundir, name, stored[name])

    names = [name for name in stored if _is_wanted(name, wanted)]
    names = [name for name in names if not _is_here(ledger, rundir, name, stored[name])]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(fetch, names))
    if (alive := stored.get("launcher.json")) and rundir.launcher_file.is_file():
        os.utime(rundir.launcher_file, (alive.modified_at, alive.modified_at))
    if not rundir.plan_file.is_file():
        raise StoreError(f"{store.address}/plan.json: cannot be read", "try again")
    if "launcher.json" not in stored and ledger.get("launcher.json"):
        rundir.launcher_file.unlink(missing_ok=True)
        ledger.drop("launcher.json")


def _is_wanted(name: str, globs: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    return ".." not in path.parts and any(
        path.match(glob) and len(path.parts) == glob.count("/") + 1 for glob in globs
    )


def _is_here(ledger: Ledger, rundir: RunDir, name: str, stored: Stored) -> bool:
    return ledger.is_current(name, stored) and (rundir.path / name).is_file()


def _fetch_one(store: Store, ledger: Ledger, rundir: RunDir, name: str, stored: Stored) -> None:
    file, entry = rundir.path / name, ledger.get(name)
    lines = name.endswith(".jsonl")
    here = file.stat().st_size if file.is_file() else 0
    if lines and entry is not None and here == entry.bytes and stored.bytes > here > 0:
        with file.open("ab") as out:
            out.write(store.read(name, start=here))
    else:
        content = store.read(name)
        if not (lines and here and file.read_bytes().startswith(content)):
            write_atomically(file, content)
    if not lines or file.stat().st_size <= stored.bytes:
        if name != "summary.json":  # which is compared with times of this machine's clock
            os.utime(file, (stored.modified_at, stored.modified_at))
        ledger.set(name, stored, version_of(file))


def fetch_newest(
    store: Store,
    ledger: Ledger,
    rundir: RunDir,
    stored: dict[str, Stored],
    *,
    step: int | None = None,
) -> None:
    """Fetch the newest intact checkpoint, or that of `step`, unless this machine has it."""
    known = committed(stored)
    if step is not None:
        known = [name for name in known if int(name.removeprefix("step-")) == step]
        if not known and not (rundir.checkpoint(step) / MANIFEST).is_file():
            steps = ", ".join(n.removeprefix("step-").lstrip("0") for n in committed(stored))
            raise UsageError(f"{store.address}: no checkpoint of step {step}", f"there are {steps}")
    here = {path.name for path in complete(rundir.checkpoints)}
    for name in known:
        if name in here or (step is None and here and name < max(here)):
            return
        problem = _fetch_checkpoint(store, ledger, rundir, name, stored)
        if problem is None:
            print(f"fetched {name} from {store.address}", file=sys.stderr, flush=True)
            return
        print(f"warning: {name} is passed over: {problem}", file=sys.stderr, flush=True)
    if known:
        raise StoreError(f"{store.address}: none of {len(known)} checkpoints is intact")


def _fetch_checkpoint(
    store: Store, ledger: Ledger, rundir: RunDir, name: str, stored: dict[str, Stored]
) -> str | None:
    """Fetch a checkpoint, compare its checksums, and publish it; return what is wrong with it."""
    folder, inside = rundir.checkpoints / f".{name}.fetched" / name, f"checkpoints/{name}"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        sealed = store.read(f"{inside}/{MANIFEST}")
        write_atomically(folder / MANIFEST, sealed)
        files = read_manifest(folder).files
        if any(Path(file).name != file for file in files):
            return f"{inside}/{MANIFEST}: names files elsewhere"
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(lambda file: store.fetch(f"{inside}/{file}", folder / file), files))
        if problem := damage(folder):
            return problem
        publish(folder, rundir.checkpoint(int(name.removeprefix("step-"))))
    except ColotrainError as error:
        return error.problem
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    versions = {file: entry.xxh128 for file, entry in files.items()}
    for file, version in {**versions, MANIFEST: version_of_content(sealed)}.items():
        if found := stored.get(f"{inside}/{file}"):
            ledger.set(f"{inside}/{file}", found, version)
    return None


def address_of(plan: RunPlan) -> str | None:
    """Return the address of a run in its store; None if it has none."""
    return None if plan.runs_dir is None else f"{plan.runs_dir.rstrip('/')}/{plan.name}"
