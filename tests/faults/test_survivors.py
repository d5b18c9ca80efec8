"""When a rank fails, the others do not go on for long: in a long step, or while they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from colotrain.events.event import Event
from colotrain.launch.survivors import FINISH_S
from tests.running import Colotrain, losses

MODEL = """
import os, signal, time
import torch
from torch import nn

RANK, AT = os.environ.get("RANK"), os.environ.get("AT")
LONG_S = 90.0

def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def fail(what):
    # rank 1 fails, and rank 0 would be busy for long
    if RANK == "0" and not os.path.exists(what + "-over"):
        os.close(os.open(what + "-over", os.O_CREAT))
        time.sleep(LONG_S)
    elif RANK == "1" and once(what):
        while not os.path.exists(what + "-over"):
            time.sleep(0.01)
        if what == "raise":
            raise ValueError("the reactor is too warm")
        os.kill(os.getpid(), signal.SIGKILL)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.count = 0
        if AT == "start" or (AT == "again" and os.path.exists("kill")):
            fail("begin")

    def forward(self, x):
        self.count += self.training
        if self.count == 5 and AT == "again":
            fail("kill")
        if self.count == 5 and AT == "step":
            fail("raise")
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

class Own(torch.optim.SGD):
    # its steps depend on the whole gradient's norm, for which every rank waits
    count = 0

    def step(self, closure=None):
        self.count += 1
        if AT == "optimizer":
            self.kill()
        squares = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            group["lr"] /= 1.0 + float(squares.full_tensor().sqrt())
        super().step()
        if AT == "save":
            self.kill()

    def kill(self):
        if RANK == "1" and self.count == 5 and once("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

def data():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=g)} for _ in range(64)]
"""
PLAN = (
    *("model.target=mine:Model", "data.target=mine:data", "optim.lr=0.01", "plugin=zero2"),
    *("train.global_batch=4", "train.micro_batch=2", "cluster.procs_per_node=2"),
    *("train.max_steps=6", "train.eval_every=0", "elastic.memory_copy=off", "name=hurt"),
)
WITHIN_S = 20.0
"""Less than torch's 30, and far less than the busy rank's 90."""


def run(colotrain: Colotrain, at: str, *more: str) -> tuple[list[float], list[Event]]:
    (colotrain.cwd / "mine.py").write_text(MODEL)
    result = colotrain("run", *PLAN, *more, "--json", env={"AT": at})
    assert result.code == 0, result.err
    return losses(result.json), colotrain.events("hurt")


def seconds_to_restart(events: list[Event], failed: Path) -> float:
    """Seconds from the failure of rank 1, which made the file, to the restart after it."""
    at = failed.stat().st_mtime
    return min(e.t for e in events if e.kind == "restart" and e.t >= at) - at


def causes(events: list[Event]) -> list[str]:
    return [e.fields["cause"] for e in sorted(events, key=lambda e: e.t) if e.kind == "restart"]


def test_a_kill_before_the_first_step(colotrain: Colotrain) -> None:
    found, events = run(colotrain, "start")
    assert len(found) == 6
    assert seconds_to_restart(events, colotrain.cwd / "begin-over") < WITHIN_S
    (cause,) = causes(events)
    assert cause.startswith("rank 1 was killed by SIGKILL")


def test_a_kill_in_a_step_and_one_while_ranks_start_again(colotrain: Colotrain) -> None:
    found, events = run(colotrain, "again")
    assert len(found) == 6
    for name in ("kill-over", "begin-over"):
        assert seconds_to_restart(events, colotrain.cwd / name) < WITHIN_S
    # the kernel counts all processes that it ends for want of memory: another test has some
    assert [cause[:28] for cause in causes(events)] == ["rank 1 was killed by SIGKILL"] * 2


def test_an_error_of_one_rank_while_another_computes(colotrain: Colotrain) -> None:
    found, events = run(colotrain, "step")
    assert len(found) == 6
    assert seconds_to_restart(events, colotrain.cwd / "raise-over") < WITHIN_S
    (cause,) = causes(events)
    assert cause.startswith("rank 1 failed in forward or backward of step")
    assert "the reactor is too warm" in cause


@pytest.mark.parametrize("plugin", ["zero2", "zero3"])
def test_a_kill_while_another_rank_waits_in_an_optimizer_of_ones_own(
    colotrain: Colotrain, plugin: str
) -> None:
    more = (f"plugin={plugin}", "optim.name=mine:Own", "checkpoint.every=2")
    found, events = run(colotrain, "optimizer", *more)
    assert len(found) == 6
    assert seconds_to_restart(events, colotrain.cwd / "kill") < FINISH_S
    (cause,) = causes(events)
    assert cause.startswith("rank 1 was killed by SIGKILL")
    (error,) = (e.fields["error"] for e in events if e.kind == "failed")
    assert error.startswith("RuntimeError: ")


def test_a_kill_while_another_rank_waits_for_a_checkpoint(colotrain: Colotrain) -> None:
    more = ("optim.name=mine:Own", "checkpoint.every=1", "checkpoint.async=false")
    found, events = run(colotrain, "save", *more)
    assert len(found) == 6
    assert seconds_to_restart(events, colotrain.cwd / "kill") < FINISH_S
    (cause,) = causes(events)
    assert cause.startswith("rank 1 was killed by SIGKILL")
