"""From the command to the first step, for a model of the user's own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.running import Colotrain

MINE = """
import os, sys, time
import torch
from torch import nn

with open("imported", "a") as note:
    note.write(f"{os.getpid()} ")
print("printed while it is imported")

class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 1)

    def forward(self, x, y):
        return ((self.inner(x) - y) ** 2).mean()

def samples(width=8):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(width, generator=generator), "y": torch.ones(1)} for _ in range(64)]

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.missing["key"]

def slow():
    open("looking", "w").close()
    time.sleep(600)
"""
NEWLINE = "\n"
OWN = (
    "model.target=mine:Model",
    "data.target=mine:samples",
    "train.max_steps=2",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_steps=0",
    "checkpoint.every=0",
    "cluster.procs_per_node=2",
)


@pytest.fixture
def own(colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch) -> Colotrain:
    """Whose launcher has torch imported, and looks by itself."""
    monkeypatch.setenv("COLOTRAIN_CACHE", str(colotrain.cwd / "cache"))
    (colotrain.cwd / "mine.py").write_text(MINE)
    return colotrain


@pytest.fixture
def cold(own: Colotrain) -> Colotrain:
    """Whose launcher has the server's processes look."""
    return Colotrain(own.cwd, cold=True)


def num_imports(own: Colotrain) -> int:
    return len(importers(own))


def importers(own: Colotrain) -> set[int]:
    """The processes that have imported the user's module since this was asked."""
    file = own.cwd / "imported"
    pids = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return {int(pid) for pid in pids}


def test_the_second_run_of_a_model_does_not_look_at_it_again(own: Colotrain) -> None:
    before = time.time()
    first = own.run(*OWN, "name=first")  # its summary is all of stdout
    assert num_imports(own) == 3, "a look and two ranks"
    launch = next(event for event in own.events("first") if event.kind == "launch")
    step = next(e for e in own.events("first") if e.kind == "step" and e.rank == 0)
    assert before - 0.1 < launch.fields["began_at"] < launch.t
    assert first["time_to_first_step_s"] == pytest.approx(step.t - launch.fields["began_at"])
    second = own.run(*OWN, "name=second")
    assert num_imports(own) == 2
    assert second["loss"] == first["loss"]
    assert second["memory"]["predicted_peak"] == first["memory"]["measured_peak"], "it is known"
    source = own.cwd / "mine.py"
    source.write_text(source.read_text().replace("width=8", "width=16"))
    plan = own("plan", *OWN, "--json")
    assert num_imports(own) == 1
    assert plan.json["parameters"]["total"] == 17


def test_what_is_wrong_with_the_users_code_is_one_line(own: Colotrain) -> None:
    for target, said in (
        ("mine:Broken", f"(mine.py:{1 + MINE[: MINE.index('self.missing')].count(NEWLINE)})"),
        ("mine:Nothing", "known: Broken, Model"),
        ("not_there:Model", "a module that can be found"),
    ):
        result = own("run", *OWN, f"model.target={target}", "name=wrong", "--json")
        lines = [line for line in result.err.splitlines() if not line.startswith("printed")]
        assert (result.code, result.out, len(lines)) == (2, "", 1), result.err
        assert lines[0].startswith(f"error: model.target={target}: expected ")
        assert said in lines[0]
    assert not own.rundir("wrong").path.exists()


@pytest.mark.slow
def test_the_launcher_never_imports_the_users_code(cold: Colotrain) -> None:
    cold.run(*OWN, "name=one")  # its summary is all of stdout
    launch = next(event for event in cold.events("one") if event.kind == "launch")
    found = importers(cold)
    assert len(found) == 4, "looks at the model and at its loss, and two ranks"
    assert launch.fields["pid"] not in found
    result = cold("run", *OWN, "model.target=mine:Broken", "name=wrong", "--json")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("error: model.target=mine:Broken: expected ") == 1
    assert "Traceback" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_the_model_is_looked_at_leaves_nothing(
    cold: Colotrain, number: signal.Signals
) -> None:
    process = cold.start("run", *OWN, "model.target=mine:slow")
    deadline = time.monotonic() + 300
    while not (cold.cwd / "looking").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert not Path(cold.cwd, "runs").exists()
