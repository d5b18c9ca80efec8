"""Measurements a worker takes of itself: memory, and what its device can do at best."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

_KIB = 1024
_STATUS_FIELDS = re.compile(rb"^Vm(HWM|RSS):\s*(\d+) kB", re.MULTILINE)

_LARGEST = {"cpu": 2048, "cuda": 8192}
_LONG_ENOUGH_S = 0.01
_BUDGET_S = 0.1


def memory_now() -> tuple[int, int]:
    """(resident, peak) bytes of this process; well under 50 µs.

    The peak is the highest resident size so far (or since `reset_peak`), or on CUDA the highest
    allocation on the current device (`torch.cuda.max_memory_allocated`). What `leave_out` named
    is in neither.
    """
    resident, peak = (n - _earlier.left_out for n in _from_status() or _from_psutil())
    if torch.cuda.is_initialized():
        return resident, torch.cuda.max_memory_allocated()
    return resident, peak


def held_now() -> int:
    """Bytes that count against the budget: of tensors on the GPU, else what is resident."""
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else memory_now()[0]


def highest_peak() -> int:
    """The peak of `memory_now` over the whole life of the process, whoever reset it."""
    return max(_earlier.highest, memory_now()[1])


def leave_out(num_bytes: int) -> None:
    """Resident memory that other processes of the host account for does not count from now on.

    With parameters in common each rank counts its own part, so that the sum over ranks is right.
    """
    if num_bytes != _earlier.left_out:
        reset_peak()  # what was reached so far is counted as it was
    _earlier.left_out = num_bytes


class _Earlier:
    highest = 0
    left_out = 0


_earlier = _Earlier()


def reset_peak() -> None:
    """Let the peak of `memory_now` begin again at what is resident now."""
    _earlier.highest = highest_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # where the system cannot, peaks stay those of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def _from_status() -> tuple[int, int] | None:
    """VmRSS and VmHWM, or None where the system has no such file or fields."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            found = dict(_STATUS_FIELDS.findall(file.read()))
    except OSError:
        return None
    if b"RSS" not in found or b"HWM" not in found:
        return None
    return int(found[b"RSS"]) * _KIB, int(found[b"HWM"]) * _KIB


def _from_psutil() -> tuple[int, int]:
    resident = psutil.Process().memory_info().rss
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    in_bytes = highest if sys.platform == "darwin" else highest * _KIB
    return resident, max(resident, in_bytes)


def matmul_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of a square matmul on `device` in floating-point operations per second.

    Takes about 0.1 s once the device is warm; sizes grow until one is worth timing. Call it before
    anything else is allocated: it resets CUDA's peak-memory statistics afterwards. 0.0 where the
    device cannot multiply in `dtype`.
    """
    try:
        return _best_rate(device, dtype)
    except RuntimeError:  # not implemented for this dtype, or no memory left for the probe
        return 0.0
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _best_rate(device: torch.device, dtype: torch.dtype) -> float:
    size, best = 256, 0.0
    multiply = _multiplication(size, device, dtype)
    multiply()  # the first one builds handles, thread pools and kernels
    deadline = time.perf_counter() + _BUDGET_S
    while True:
        seconds = multiply()
        best = max(best, 2.0 * size**3 / seconds)
        if time.perf_counter() + 2 * seconds > deadline:
            return best
        if seconds < _LONG_ENOUGH_S and size < _LARGEST.get(device.type, 2048):
            size *= 2
            multiply = _multiplication(size, device, dtype)


def _multiplication(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """A function that multiplies two matrices once and returns the seconds it took."""
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay untouched
    left = torch.empty(size, size, device=device, dtype=dtype).uniform_(-1, 1, generator=own)
    out = torch.empty_like(left)

    def multiply() -> float:
        _synchronize(device)
        started = time.perf_counter()
        torch.mm(left, left, out=out)
        _synchronize(device)
        return max(time.perf_counter() - started, 1e-9)

    return multiply


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_log() -> str:
    """The file that this process's stderr goes to; empty where it is none or cannot be told."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if path.startswith("/") and path.endswith(".log") else ""
