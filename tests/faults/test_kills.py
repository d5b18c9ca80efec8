"""Killed at any moment, a run goes on with the same losses and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.kills import Kill, environment, history, inflict, plan, processes, straight
from tests.running import Colotrain, wait_for_step

pytestmark = [
    pytest.mark.timeout(1800),  # seconds, of a busy machine
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return straight(Colotrain(tmp_path_factory.mktemp("straight")), "zero2")


AT_A_TIME = (
    Kill(whom="rank 1", after_s=0.2),
    Kill(whom="launcher", after_s=0.3),
    Kill(whom="rank 0", after_s=0.1),
)
WITHIN_A_SAVE = (
    Kill(whom="rank 0", rank=0, operation=8),
    Kill(whom="launcher", rank=0, operation=6),
    Kill(whom="rank 1", rank=1, operation=3),
)


@pytest.mark.parametrize("kills", [AT_A_TIME, WITHIN_A_SAVE], ids=["at a time", "within a save"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, expected: list[float], kills: tuple[Kill, ...]
) -> None:
    colotrain = Colotrain(tmp_path)
    assert inflict(colotrain, "killed", "zero2", kills) >= 2
    assert history(colotrain, "killed") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "divided",
    [("mesh.cp=2",), ("mesh.tp=2", "model.args.num_heads=4", "model.args.num_kv_heads=2")],
    ids=["samples", "matrices"],
)
def test_a_killed_rank_of_a_group_that_divides_its_work_leaves_no_trace_in_the_losses(
    tmp_path: Path, divided: tuple[str, ...]
) -> None:
    colotrain = Colotrain(tmp_path)
    expected = straight(colotrain, "zero3", options=divided)
    assert inflict(colotrain, "killed", "zero3", AT_A_TIME, options=divided) >= 2
    assert history(colotrain, "killed") == expected


def test_a_run_has_nothing_in_shared_memory_that_a_kill_could_leave(
    colotrain: Colotrain, started: Callable[[subprocess.Popen[str]], subprocess.Popen[str]]
) -> None:
    running = started(colotrain.start("run", *plan(2000), "name=named", env=environment()))
    wait_for_step(colotrain, "named", 1)
    found = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in processes(colotrain.cwd)}
    assert sum("libtorch" in maps for maps in found.values()) >= 3  # the launcher, two workers
    assert not [line for maps in found.values() for line in maps.splitlines() if "/dev/shm" in line]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
