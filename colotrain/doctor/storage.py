"""Checks that runs and caches can be written, how fast, and that the clocks agree."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from colotrain.cache_folder import FIX, is_shared, objection
from colotrain.doctor.finding import Environment, Finding, fail, graded, ok, size, warn

GIB = 1 << 30
TRIAL_BYTES = 32 << 20
SLOW_BYTES_PER_S = 50e6
CLOCK_S = 2.0
"""Seconds by which clocks may differ; more makes the times in a run's records misleading."""


def check_runs(env: Environment) -> Iterator[Finding]:
    """Check that the run folder is writable, large and fast enough, and has the right time."""
    folder = _nearest(env.runs)
    probe = folder / f".colotrain-doctor-{secrets.token_hex(4)}"
    try:
        started = time.perf_counter()
        with probe.open("wb") as out:
            out.write(os.urandom(1 << 20) * (TRIAL_BYTES >> 20))
            out.flush()
            os.fsync(out.fileno())
        seconds = time.perf_counter() - started
        written_at, now = probe.stat().st_mtime, time.time()
    except OSError as error:
        fix = "run from a folder that you may write to and that has room"
        yield fail("runs", f"{folder} cannot be written ({error.strerror})", fix)
        return
    finally:
        with suppress(OSError):
            probe.unlink()
    yield ok("runs", f"{env.runs} on {_filesystem(folder)} can be written")
    yield from _check_room(folder)
    speed = TRIAL_BYTES / seconds
    if speed < SLOW_BYTES_PER_S:
        fix = "put ./runs on a faster disk; checkpoints wait for it"
        yield warn("disk speed", f"{size(speed)}/s with fsync", fix)
    else:
        yield ok("disk speed", f"{size(speed)}/s with fsync")
    yield from _check_clock(env, written_at - now)


def _nearest(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _check_room(folder: Path) -> Iterator[Finding]:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    fix = "remove old runs, or set checkpoint.keep=1; a checkpoint is 12 bytes per parameter"
    text = f"{size(free)} are free" + (f" in {folder}" if free < 5 * GIB else "")
    yield graded("disk space", free, text, fix, least=GIB // 4, few=5 * GIB)
    if stat.f_files and stat.f_favail < 10_000:
        yield warn("disk space", f"only {stat.f_favail:,} more files fit in {folder}", fix)


def _check_clock(env: Environment, skew_s: float) -> Iterator[Finding]:
    """Compare the file server's clock with this machine's, and look for files from the future."""
    fix = "synchronise the clocks (chrony, ntpd) of this machine and of the file server"
    if abs(skew_s) > CLOCK_S:
        yield warn("clock", f"the file server's clock is {skew_s:+.0f} s off this machine's", fix)
        return
    newest = max((_modified_at(p) for p in env.runs.glob("*/plan.json")), default=0.0)
    ahead = newest - env.now
    if ahead > CLOCK_S:
        text = f"a run in {env.runs} was written {ahead:.0f} s in the future"
        yield warn("clock", text, fix)
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(env.now)))


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _filesystem(folder: Path) -> str:
    """Type of the filesystem of `folder`."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        mounts = []
    here = [m for m in mounts if folder.absolute().is_relative_to(m.mountpoint)]
    # the last of several mounts at one point hides the others
    inner = max(reversed(here), key=lambda mount: len(mount.mountpoint), default=None)
    return "an unknown filesystem" if inner is None else str(inner.fstype)


def check_cache(env: Environment) -> Iterator[Finding]:
    folder = _nearest(env.cache)
    probe = folder / f".colotrain-doctor-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        fix = "set COLOTRAIN_CACHE to a folder that you may write to"
        yield fail("cache", f"{folder} cannot be written ({error.strerror})", fix)
        return
    if folder == env.cache and not is_shared() and (why := objection(folder.stat())):
        yield warn("cache", f"{folder} {why}: it is not read", FIX)
        return
    yield ok("cache", f"{env.cache} can be written")
