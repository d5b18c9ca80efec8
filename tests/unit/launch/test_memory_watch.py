"""A run that nears the end of memory is ended with its sizes and what to change."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colotrain import host
from colotrain.launch import memory_watch
from colotrain.launch.memory_watch import MemoryWatch, describe, held_bytes
from colotrain.launch.watch import Watch
from colotrain.planner import measured_peaks
from colotrain.planner.memory import Estimate, around
from colotrain.rundir import RunDir
from colotrain.spec.memory import MemoryBreakdown
from tests.unit.events.test_view import plan_of

GIB = 1 << 30


def watching(tmp_path: Path, pid: int) -> MemoryWatch:
    plan = plan_of()
    watch = Watch(plan=plan, rundir=RunDir(tmp_path), pids=lambda: {0: pid})
    return MemoryWatch(plan, watch)


@pytest.mark.parametrize("held", [0.1, 0.6])
def test_a_run_that_fills_the_memory_is_ended_and_a_small_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: float
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(host, "free_bytes", lambda: 50 << 20)
    monkeypatch.setattr(memory_watch.psutil, "swap_memory", lambda: type("S", (), {"free": 0}))
    monkeypatch.setattr(memory_watch, "held_bytes", lambda pid: int(held * 10 * GIB))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank:
        looking = watching(tmp_path, rank.pid)
        looking.start()
        deadline = time.monotonic() + 20
        while held > 0.25 and rank.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        looking.close()
        rank.kill()
    verdict = looking.watch.verdict
    if held < 0.25:
        assert verdict is None
        return
    assert rank.returncode == -9
    assert looking.watch.is_final
    assert verdict is not None
    for part in ("50MiB of 10GiB were left", "the ranks held 6GiB", "plugin=gemini"):
        assert part in verdict


def test_while_there_is_memory_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(host, "free_bytes", lambda: 9 * GIB)
    looking = watching(tmp_path, os.getpid())
    looking.start()
    looking.close()
    assert looking.watch.verdict is None


def test_what_is_shared_counts_once() -> None:
    assert 1 << 20 < held_bytes(os.getpid()) < host.memory_bytes()
    assert held_bytes(2**22 + 1) == 0


def test_what_to_change_is_what_the_plan_has_not_changed_yet() -> None:
    plan = plan_of()
    assert describe(plan, [1], free=1, whole=2).count("planned") == 1


# What finished runs needed


def test_a_measured_peak_takes_the_estimate_s_place_and_stays_a_sum() -> None:
    breakdown = MemoryBreakdown(parameters=100, activations=50, buffers=20, baseline=30)
    estimate = Estimate(breakdown=breakdown, peak=around(200, exact=190))
    for measured in (260, 185, 140):
        known = measured_peaks.corrected(estimate, measured)
        assert known.breakdown.total == measured
        assert known.breakdown.parameters == 100
        assert known.peak.exact == min(190, measured)
        assert known.peak.low <= measured <= known.peak.high
        assert known.peak.high - measured < 0.06 * measured


def test_peaks_are_kept_by_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path))
    assert measured_peaks.recall("shape") is None
    measured_peaks.remember("shape", 123)
    assert measured_peaks.recall("shape") == 123
    (tmp_path / "peaks" / "torn.json").write_text('{"peak_by')
    assert measured_peaks.recall("torn") is None
