"""The run directory: all files that a run reads and writes. RunDir defines every path in it."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from colotrain.errors import ColotrainError, UsageError, fix_of, suggest
from colotrain.records import from_json
from colotrain.spec.plan import RunPlan

RUNS = Path("runs")
HOW_TO_START = "start one, as in `colotrain run recipe=llm-tiny`"
OFFLOAD = "offload"
"""Folder of gemini's disk tier inside a run directory, if the user set no other."""
OTHERS = ("trackers", "code")
"""Beginnings of folders in a run directory that other programs fill: trackers, and git."""
MOST_READ = 64 << 20
"""Maximum bytes of a file that is read whole."""
NOISE = "noise"
"""Content of a gradient record request that also asks for the gradient noise."""


class _At:
    """An attribute of `RunDir`: a path inside the run directory."""

    def __init__(self, inside: str) -> None:
        self.inside = inside

    def __get__(self, rundir: RunDir, _: type[RunDir]) -> Path:
        return rundir.path / self.inside


class RunDir:
    """Paths of one run. No other class or function joins file names of a run."""

    plan_file = _At("plan.json")
    summary_file = _At("summary.json")
    launcher_file = _At("launcher.json")
    """Identity of the launcher: host, process id and its start time."""
    events = _At("events")
    logs = _At("logs")
    checkpoints = _At("checkpoints")
    launcher_log = _At("logs/launcher.log")
    """Output of the launcher of a detached run."""
    notify_log = _At("logs/notify.log")
    """Output of the command that is told what becomes of the run."""
    stop_file = _At("control/stop")
    """File whose presence asks every rank to save and stop after its current step."""
    grads_request_file = _At("control/grads")
    """File whose presence asks for a gradient record of the next step."""
    profile_request_file = _At("control/profile.json")
    """File whose presence asks for traces of the next steps."""
    traces = _At("traces")
    heartbeats = _At("control/heartbeats")
    """Folder of the ranks' heartbeats."""
    rendezvous_file = _At("control/meeting.json")
    """Secret by which the launchers of a run's nodes recognise one another."""
    cancel_file = _At("control/cancel")
    """File whose presence keeps the run's job from being requeued."""
    finished_file = _At("control/finished")
    """File that a job writes when its run has finished, so that a requeued job ends at once."""
    job_file = _At("job.json")
    """The run's job in a scheduler, with its script."""
    store_file = _At("control/store.json")
    """Files that are in the run's object store as they are here."""
    store_lock = _At("control/store.lock")
    """File that is locked by the process that sends the run to its store."""
    sending = _At("control/sending")
    """Folder of hard links to a checkpoint that is being sent, which may be deleted meanwhile."""
    hosts = _At("control/hosts")
    """Folder in which the hosts of a job record how their launchers fare, a file per node."""
    sweep_file = _At("sweep.json")
    """Runs and overrides of a sweep, in the sweep's folder."""
    code = _At("code")
    """Copy of the working tree from which the run was submitted."""
    config_file = _At("config.yaml")
    """Composed configuration, which can be given to `recipe=`."""
    signature_file = _At("signature.json")
    """Signatures of the plan and the configuration (`colotrain.runs.trust`)."""
    precomputed = _At("precomputed")
    """What a reference or a teacher says of the samples, a folder for each."""
    samples_file = _At("samples.jsonl")
    """Texts that the model wrote after evaluations: a JSON object per line."""
    cases = _At("cases")
    """verify: one run directory per case."""
    trajectory_file = _At("trajectory.safetensors")
    """verify: gradients and parameters of every step of a case."""
    verification_file = _At("facts.json")
    """verify: losses, step count and frozen names of a case."""
    audit = _At("audit")
    """audit: what the processes of the command wrote for the checks."""
    launcher_events = _At("events/launcher.jsonl")
    upload_events = _At("events/uploads.jsonl")

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @property
    def argument(self) -> str:
        """Word of a shell by which a command in the current folder finds the run."""
        path = os.path.join(".", os.path.relpath(self.path))
        return shlex.quote(self.name if self.path == RUNS.absolute() / self.name else path)

    @property
    def name(self) -> str:
        return self.path.name

    def tier_folder(self, disk_path: str) -> Path:
        """Return the folder of gemini's disk tier; a relative path is inside the run directory."""
        return self.path / disk_path

    def request_grads(self, *, noise: bool = False) -> None:
        """Ask a running job for a gradient record of its next step."""
        self.write(self.grads_request_file, NOISE if noise else "")

    def grads_request(self) -> str | None:
        """Return the content of the request, "" or `NOISE`; None if there is no request."""
        try:
            return read_text(self.grads_request_file, self.open).strip()
        except (OSError, ValueError):
            return None

    def request_profile(self, *, num_steps: int, ranks: Sequence[int]) -> None:
        """Ask a running job for traces of its next steps."""
        asked = {"num_steps": num_steps, "ranks": list(ranks)}
        self.write(self.profile_request_file, json.dumps(asked))

    def profile_request(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of steps and the ranks that are asked for; None if there are none."""
        try:
            asked = read_json(self.profile_request_file, self.open)
            return max(1, int(asked["num_steps"])), tuple(int(rank) for rank in asked["ranks"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def job_script(self, ending: str) -> Path:
        """Return the submitted job script; for a sweep, it is in the sweep's folder."""
        return self.path / f"job.{ending}"

    def job_log(self, job: str, *, node: int = 0) -> Path:
        """Return the log of a job, or of a node that has one of its own."""
        return self.logs / (f"job-{job}-node{node}.log" if node else f"job-{job}.log")

    def trace_file(self, *, first: int, last: int, rank: int) -> Path:
        return self.traces / f"steps-{first:08d}-{last:08d}-rank{rank:05d}.json.gz"

    @property
    def collective_dumps(self) -> Path:
        """Prefix, before a rank, of the files of NCCL's flight recorder."""
        return self.logs / "collectives_rank"

    def heartbeat_file(self, rank: int) -> Path:
        return self.heartbeats / f"rank{rank:05d}.json"

    def audit_file(self, *, rank: int, pid: int) -> Path:
        return self.audit / f"rank{rank:05d}-{pid}.jsonl"

    def tracker(self, name: str) -> Path:
        """Return the folder of a tracker."""
        return self.path / "trackers" / name

    def event_file(self, *, rank: int, attempt: int) -> Path:
        return self.events / f"rank{rank:05d}-attempt{attempt:04d}.jsonl"

    def node_events(self, node: int) -> Path:
        """Return the events file of the launcher of a node other than 0."""
        return self.events / f"node{node:05d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def create(self) -> None:
        """Create the folders, readable only by the user; `UsageError` for links in them."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            self.path.chmod(0o700)
        self.check_files()
        for folder in (self.events, self.logs, self.checkpoints, self.stop_file.parent):
            make_folder(folder, inside=self.path)

    def check_files(self) -> None:
        """Raise `UsageError` for a link, a FIFO or a device where colotrain writes."""
        if strange := next(self._strange_files(), None):
            problem = f"{strange}: expected a file or a folder, no link, FIFO or device"
            fix = f"look at it, and take it out; {self.path} itself may be a link to a folder"
            raise UsageError(problem, fix)

    def _strange_files(self) -> Iterator[Path]:
        """Yield what is neither a file nor a folder, where colotrain writes."""
        folders = [self.path]
        while folders:
            with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    if entry.is_dir(follow_symlinks=False):
                        is_others = path.parent == self.path and path.name.startswith(OTHERS)
                        folders += [] if is_others else [path]
                    elif not entry.is_file(follow_symlinks=False):
                        yield path

    def make_folder(self, path: Path) -> None:
        """Make a folder of this run, for the user alone, without following links."""
        make_folder(path, inside=self.path)

    def open(self, path: str | Path, flags: int) -> int:
        """Open a regular file of this run, following no links: an opener, like `regular`."""
        return open_inside(self.path, path, flags)

    def append(self, path: Path) -> BinaryIO:
        """Open a file of this run for writing at its end."""
        return os.fdopen(self.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")

    def write(self, path: Path, content: str | bytes) -> None:
        """Replace a file of this run atomically; its folder is made if missing."""
        if path.parent != self.path:
            self.make_folder(path.parent)
        write_atomically(path, content, inside=self.path)

    def write_plan(self, plan: RunPlan) -> None:
        """Write `plan.json`; an earlier, different plan is kept as `plan-N.json`."""
        text = plan.to_json()
        if self.plan_file.exists() and read_text(self.plan_file, self.open) != text:
            number = len(list(self.path.glob("plan-*.json"))) + 1
            os.replace(self.plan_file, self.path / f"plan-{number}.json")
        self.write(self.plan_file, text)

    def plan(self, digest: str | None = None) -> RunPlan:
        """Return the plan; `UsageError` unless it has the `digest` of the one that was checked."""
        try:
            text = read_text(self.plan_file, self.open)
        except (OSError, UnicodeDecodeError) as error:
            fix = fix_of(error, "give a run directory that has a plan.json")
            raise ColotrainError(f"{self.plan_file}: cannot be read ({error})", fix) from error
        return RunPlan.from_json(text, digest=digest, file=self.plan_file)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def next_attempt(self) -> int:
        """Return one more than the highest attempt with an event file that is read, or 0."""
        ending = re.compile(r"-attempt(\d{4,6})\.jsonl$")
        found = (ending.search(entry.name) for entry in self.events.glob("rank*.jsonl"))
        return max((int(match[1]) for match in found if match), default=-1) + 1

    @staticmethod
    def find(name: str, *, root: Path = RUNS) -> RunDir:
        """Return the run called `name`: a path, or a name under `root`, as given or as a folder."""
        for candidate in (root / name, Path(name), root / run_name(name)):
            if (candidate / "plan.json").is_file():
                return RunDir(candidate)
        fix = suggest(name, (run.name for run in RunDir.all(root)))
        raise UsageError(f"no run {name!r}", fix or f"there are none: {HOW_TO_START}")

    @staticmethod
    def all(root: Path = RUNS) -> list[RunDir]:
        """Return all runs under `root`, oldest first."""
        plans = sorted(root.glob("*/plan.json"), key=lambda plan: plan.lstat().st_mtime)
        return [RunDir(plan.parent) for plan in plans]


def run_name(text: str) -> str:
    """Return `text` as a folder name: letters, digits, `.`, `_`, `-` only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def write_atomically(path: Path, content: str | bytes, *, inside: Path | None = None) -> None:
    """Replace `path` atomically: a reader sees the old or the new content, never a mixture.

    No link between the folder `inside`, by default the file's own, and the file is followed.
    """
    with replacement_of(path, inside=inside or path.parent) as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement_of(path: Path, *, inside: Path, private: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of `path` at the end of the context.

    An error leaves `path` as it is. No link below the folder `inside` is followed. Unless it is
    `private`, others may read the file as the umask permits.
    """
    temporary = f".{path.name}-{secrets.token_hex(8)}"
    with folder_of(inside, path) as (at, name):
        mode = 0o600 if private else 0o666
        handle = os.open(temporary, _NEW | os.O_WRONLY, mode, dir_fd=at)
        try:
            with os.fdopen(handle, "wb") as out:
                if private:
                    os.fchmod(handle, mode)
                yield out
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(temporary, dir_fd=at)
            raise


def is_unfinished(name: str, *, of: str | None = None) -> bool:
    """Whether a file has the name of a `replacement_of` a file, or of the file `of`."""
    match = re.fullmatch(r"\.(.+)-[0-9a-f]{16}", name)
    return match is not None and of in (None, match[1])


def make_folder(path: Path, *, inside: Path, private: bool = True) -> None:
    """Make a folder below `inside`, and those between; follow no links.

    New folders are for the user alone; unless they are `private`, for whom the umask permits.
    """
    at = os.open(inside, _FOLDER)
    try:
        for name in _names_inside(inside, path):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700 if private else 0o777, dir_fd=at)
                if private:
                    os.chmod(name, 0o700, dir_fd=at)
            at = _step_into(at, name, path)
    finally:
        os.close(at)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_room(folder: Path, needed: int, fix: str) -> None:
    """Raise `ColotrainError` where the disk of a folder has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ColotrainError(f"{folder}: {needed:,} bytes are needed and {free:,} are free", fix)


def regular(path: str | Path, flags: int) -> int:
    """Opener for `open`; `OSError` for FIFOs and devices, which could block or not end."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return handle


Opener = Callable[[Any, int], int]  # `regular`, or the `open` of the run that has the file


def read_text(path: Path, opener: Opener = regular, *, most: int = MOST_READ) -> str:
    """Return the text of a file; `OSError` for no regular one, or more than `most` bytes."""
    with open(path, "rb", opener=opener) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most >> 20} MiB", str(path))
    return content.decode()


def read_json(path: Path, opener: Opener = regular, *, most: int = MOST_READ) -> Any:
    """Return the document in a file as `read_text` reads it; `ValueError` also for deep ones."""
    return from_json(read_text(path, opener, most=most))


def open_inside(folder: Path, path: str | Path, flags: int) -> int:
    """Open a regular file below `folder`, without following links inside the folder.

    A file that is made is readable by its owner alone, whatever the umask. Links, FIFOs and devices
    raise `OSError`; the folder itself may be reached through links.
    """
    path = Path(path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block
    with folder_of(folder, path) as (at, name):
        handle = os.open(name, flags & ~os.O_TRUNC, 0o600, dir_fd=at)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if flags & os.O_CREAT and about.st_size == 0 and about.st_uid == os.geteuid():
        os.fchmod(handle, 0o600)
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


@contextmanager
def folder_of(folder: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yield a handle of the folder that holds `path`, and the file's name; errors name `path`."""
    *between, name = _names_inside(folder, path)
    at = os.open(folder, _FOLDER)
    try:
        for inner in between:
            at = _step_into(at, inner, path)
        yield at, name
    except OSError as error:
        raise _named(error, path) from None
    finally:
        os.close(at)


def _names_inside(folder: Path, path: Path) -> tuple[str, ...]:
    names = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
    if not names or ".." in names:
        raise OSError(errno.EINVAL, f"is not inside {folder}", str(path))
    return names


def _step_into(at: int, name: str, path: Path) -> int:
    """Return a handle of the folder `name` in the folder `at`, which is closed."""
    try:
        inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        raise _named(error, path) from None
    os.close(at)
    return inner


def _named(error: OSError, path: Path) -> OSError:
    """Return the error of a file that was opened by its name in a folder, with its whole path."""
    said = "is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
    return OSError(error.errno, said, str(path))
