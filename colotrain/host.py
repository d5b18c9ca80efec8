"""This host: what tells it apart, and its memory and open files, within a container's limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from colotrain.errors import ColotrainError

SHARE_OF_FREE_MEMORY = 0.9
CGROUP = Path("/sys/fs/cgroup")
FEWEST_OPEN_FILES, ENOUGH_OPEN_FILES = 128, 4096
MOST_OPEN_FILES = 65536
"""Limit that a process sets itself: torch's store, in the launcher, takes whoever connects."""
MOST_THREADS = 1024


def boot_id() -> str:
    """Return what identifies this start of the kernel; empty where it is not known."""
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


def pid_namespace() -> str:
    """Return what identifies the numbering of processes; empty where it is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def check_open_files() -> None:
    """Raise `ColotrainError` if the limit of open files is too low to start anything."""
    limit = allow_open_files()
    if limit < FEWEST_OPEN_FILES:
        problem = f"open files: at most {limit} are allowed here, and colotrain needs some hundred"
        raise ColotrainError(problem, f"raise the limit, as with `ulimit -n {ENOUGH_OPEN_FILES}`")


def chosen_threads() -> tuple[int, str]:
    """Return the threads that the environment gives a process, and the variable; (0, "") without.

    As torch reads them: MKL's before OpenMP's, of a list the first number. What is no number, for
    which MKL takes 1 thread, is not read.
    """
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and 0 < int(first) <= MOST_THREADS:
            return int(first), name
    return 0, ""


def memory_bytes() -> int:
    """Return the host's memory in bytes, or the container's limit if that is lower."""
    names = ("memory.max", "memory.limit_in_bytes")
    found = [text_of(folder / name) for folder in cgroups("memory") for name in names]
    limits = [int(text) for text in found if text.isdigit()]
    total: int = psutil.virtual_memory().total
    return min([total, *limits])


def free_bytes() -> int:
    """Return the bytes that can be allocated now; page cache that can be dropped counts as free."""
    free: int = psutil.virtual_memory().available
    for folder in cgroups("memory"):
        limits = [text_of(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
        limit = next((int(text) for text in limits if text.isdigit()), None)
        words = [line.split() for line in text_of(folder / "memory.stat").splitlines()]
        stat = {name: int(value) for name, value in words}
        used = stat.get("anon", stat.get("total_rss", 0)) + stat.get(
            "shmem", stat.get("total_shmem", 0)
        )
        if limit is not None:
            free = min(free, max(0, limit - used))
    return free


def has_room(num_bytes: int) -> bool:
    """Whether so many bytes can be allocated, and some are left."""
    return num_bytes <= SHARE_OF_FREE_MEMORY * free_bytes()


def cgroups(controller: str) -> Iterable[Path]:
    """Yield the cgroups of this process, from its own up to the root (versions 1 and 2)."""
    for line in text_of(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = CGROUP / controller if names else CGROUP
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def text_of(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
