"""Measurements of a worker process: its memory, and the peak FLOP/s of its device."""

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
    """Return (resident, peak) bytes of this process, in well under 50 µs.

    The peak is the highest resident size so far (or since `reset_peak`), or on CUDA the highest
    allocation on the current device (`torch.cuda.max_memory_allocated`). Neither counts the bytes
    given to `exclude_bytes`.
    """
    resident, peak = (n - _earlier.excluded for n in _from_status() or _from_psutil())
    if torch.cuda.is_initialized():
        return resident, torch.cuda.max_memory_allocated()
    return resident, peak


def held_now() -> int:
    """Return the bytes that count against the budget: tensors on a GPU, else resident memory."""
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else memory_now()[0]


def highest_peak() -> int:
    """Return the peak of `memory_now` over the whole life of the process, resets left aside."""
    return max(_earlier.highest, memory_now()[1])


def exclude_bytes(num_bytes: int) -> None:
    """Subtract from now on resident memory that other processes of the host account for.

    Of shared parameters each rank counts its own part, so that the sum over ranks is right.
    """
    if num_bytes != _earlier.excluded:
        reset_peak()  # the peak so far stays as it was counted
    _earlier.excluded = num_bytes


class _Earlier:
    highest = 0
    excluded = 0


_earlier = _Earlier()


def reset_peak() -> None:
    """Restart the peak of `memory_now` from the memory that is resident now."""
    _earlier.highest = highest_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # where this fails, peaks are those of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def _from_status() -> tuple[int, int] | None:
    """Return VmRSS and VmHWM, or None where the system has no such file or fields."""
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
    """Return the best rate of a square matmul on `device`, in floating-point operations per second.

    Takes about 0.1 s once the device is warm; sizes grow until a matmul is long enough to measure.
    Call it before anything else is allocated: it resets CUDA's peak-memory statistics afterwards.
    0.0 where the device cannot multiply in `dtype`.
    """
    try:
        return _best_rate(device, dtype)
    except RuntimeError:  # not implemented for this dtype, or out of memory
        return 0.0
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _best_rate(device: torch.device, dtype: torch.dtype) -> float:
    size, best = 256, 0.0
    multiply = _multiplication(size, device, dtype)
    multiply()  # the first call creates handles, thread pools and kernels
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
    """Return a function that multiplies two matrices once and returns the seconds it took."""
    own = torch.Generator(device).manual_seed(0)  # leaves the run's random numbers unchanged
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
    """Return the path of the log that stderr is written to; "" where there is none."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if path.startswith("/") and path.endswith(".log") else ""
