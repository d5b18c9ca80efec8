"""A run that is asked to stop in the middle of a long step leaves it, and makes it again later."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.checkpoints import read_whole
from tests.faults.test_resume import ledger
from tests.representatives import representatives
from tests.running import Colotrain, losses

pytestmark = pytest.mark.timeout(1800)  # seconds, of a busy machine

MODEL = """
import gc, os, random, time

import torch
import torch.nn.functional as F
from torch import nn

from colotrain.engine.step import monitor
from colotrain.engine.state.run_state import Run
from colotrain.errors import ColotrainError

monitor.LONG_STEP_S, monitor.PATIENCE_S, monitor.SHORTEST_PAUSE_S = -1.0, 0.2, 0.1
LEAVE_AT = int(os.environ.get("LEAVE_AT", -1))  # which training forward, from 0
ASKS = os.environ.get("RANK") == "1"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(12))
        self.count = 0

    def forward(self, x, target):
        if self.training:
            if self.count == LEAVE_AT:
                self.hang()
            self.count += 1
            self.mean.lerp_(x.detach().float().mean(0).to(self.mean), 0.1)
            x = x + 0.01 * random.random()
        for block in self.blocks:
            x = x + self.drop(F.gelu(block(x - self.mean)))
        return F.cross_entropy(x, target)

    def hang(self):
        if not ASKS:
            return
        if number := int(os.environ["SIGNAL"]):
            os.kill(os.getpid(), number)
        else:
            [run] = [o for o in gc.get_objects() if isinstance(o, Run)]
            error = ColotrainError("memory is nearly used up", "lower train.micro_batch")
            run.stop.ask("no memory", error=error)
        time.sleep(600)


def data():
    g = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(12, generator=g), "target": torch.randint(12, (), generator=g)}
        for _ in range(100)
    ]
"""
PLAN = (
    *("model.target=slow:Model", "data.target=slow:data", "optim.schedule.name=constant"),
    *("train.global_batch=8", "train.micro_batch=1", "cluster.procs_per_node=2"),
    *("train.max_steps=5", "observe.grads_every=0", "elastic.max_restarts=0"),
)
"""Four micro-batches a step."""
PLUGINS = {
    "zero1": (),
    "zero2": ("train.precision=fp16",),
    "zero3": (),
    "fsdp-hybrid": ("plugin.shard_size=1",),
    "gemini": ("plugin.budget.host=1MiB", "plugin.budget.disk=1GiB", "plugin.disk_path=below"),
}


@pytest.mark.parametrize("plugin", representatives(PLUGINS, kept=["zero1", "gemini"]))
def test_a_step_that_was_left_is_made_again_bit_for_bit(colotrain: Colotrain, plugin: str) -> None:
    (colotrain.cwd / "slow.py").write_text(MODEL)
    plan = (*PLAN, f"plugin={plugin}", *PLUGINS[plugin])
    straight = colotrain.run(*plan, "name=straight")
    # the second micro-batch of the third step: rank 1 never ends it
    environment = {"LEAVE_AT": str(2 * 4 + 1), "SIGNAL": str(int(signal.SIGTERM))}
    left = colotrain("run", *plan, "name=parted", "--json", env=environment)
    assert left.code == 75, left.err
    assert left.json["steps"] == 2
    assert "step 3 is left at micro-batch" in left.err
    assert sorted(p.name for p in colotrain.rundir("parted").checkpoints.iterdir()) == [
        "step-00000002"
    ]
    resumed = colotrain("resume", "parted", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == losses(straight)
    assert ledger(colotrain, "parted") == ledger(colotrain, "straight")
    expected, found = (
        read_whole(colotrain.rundir(name).checkpoint(5)) for name in ("straight", "parted")
    )
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_before_the_first_step_is_finished_nothing_needs_to_be_saved(colotrain: Colotrain) -> None:
    (colotrain.cwd / "slow.py").write_text(MODEL)
    plan = (*PLAN, "plugin=zero1", "train.max_steps=2")
    environment = {"LEAVE_AT": "1", "SIGNAL": str(int(signal.SIGTERM))}
    left = colotrain("run", *plan, "name=parted", "--json", env=environment)
    assert left.code == 75, left.err
    assert left.json["steps"] == 0
    assert "no step is finished, so there is nothing to save" in left.err
    assert "`colotrain resume parted` begins with the first step" in left.err
    assert not list(colotrain.rundir("parted").checkpoints.iterdir())
    resumed = colotrain("resume", "parted", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 2


def test_a_rank_may_end_the_run_with_an_error_and_the_last_step_is_saved(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "slow.py").write_text(MODEL)
    environment = {"LEAVE_AT": "5", "SIGNAL": "0"}
    left = colotrain("run", *PLAN, "plugin=zero1", "name=parted", env=environment)
    assert left.code == 1
    [error] = [line for line in left.err.splitlines() if line.startswith("error:")]
    assert "rank 1" in error
    assert "memory is nearly used up" in error
    assert not [e for e in colotrain.events("parted") if e.kind == "restart"]
    assert [p.name for p in colotrain.rundir("parted").checkpoints.iterdir()] == ["step-00000001"]
