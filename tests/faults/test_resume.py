"""Resuming: bit for bit where nothing changes, the same samples and losses where much does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.checkpoints import read_whole
from tests.running import SMALL, Colotrain, losses

pytestmark = pytest.mark.timeout(1800)  # seconds, of a busy machine

CONSTANT = "optim.schedule.name=constant"
DROPS = """
import numpy, random, torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x, target):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            x = x + 0.01 * random.random() + 0.01 * numpy.random.rand()
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(x - self.mean)))
        return F.cross_entropy(x * self.scale, target)

def data():
    g = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(12, generator=g), "target": torch.randint(12, (), generator=g)}
        for _ in range(100)
    ]
"""


def ledger(colotrain: Colotrain, name: str) -> dict[int, list[int]]:
    """Step → the samples that all ranks together consumed, of the last time it was made."""
    attempts: dict[int, int] = {}
    samples: dict[int, list[int]] = {}
    for event in colotrain.events(name):
        if event.kind != "step":
            continue
        step, attempt = event.fields["step"], event.attempt or 0
        if attempt > attempts.get(step, -1):
            attempts[step], samples[step] = attempt, []
        samples[step] += event.fields["samples"]
    return {step: sorted(ids) for step, ids in samples.items()}


@pytest.mark.parametrize("plugin", ["zero3", "gemini"])
def test_resuming_is_bit_identical_through_dropout_generators_and_unfreezing(
    colotrain: Colotrain, plugin: str
) -> None:
    (colotrain.cwd / "drops.py").write_text(DROPS)
    plan = (
        *("model.target=drops:Model", "data.target=drops:data", f"plugin={plugin}"),
        *("train.global_batch=8", "train.micro_batch=2", "cluster.procs_per_node=2"),
        *("freeze.patterns=[layers.0.*]", "freeze.unfreeze={4:[layers.0.weight]}", CONSTANT),
    )
    straight = colotrain.run(*plan, "name=straight", "train.max_steps=8")
    colotrain.run(*plan, "name=parted", "train.max_steps=2")
    for steps in (4, 5, 8):
        result = colotrain("resume", "parted", f"train.max_steps={steps}", "--json")
        assert result.code == 0, result.err
    assert losses(result.json) == losses(straight)
    expected, found = (
        read_whole(colotrain.rundir(name).checkpoint(8)) for name in ("straight", "parted")
    )
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_plugin_and_world_size_may_change_again_and_again(colotrain: Colotrain) -> None:
    plan = (*SMALL, "train.global_batch=12", "train.micro_batch=1", CONSTANT)
    legs: Sequence[tuple[int, str]] = (
        (4, "zero2"),
        (2, "gemini"),
        (3, "fsdp-hybrid"),
        (4, "zero1"),
    )
    first = ("plugin=zero2", "cluster.procs_per_node=4")
    straight = colotrain.run(*plan, *first, "name=straight", "train.max_steps=12")
    colotrain.run(*plan, *first, "name=parted", "train.max_steps=3")
    for leg, (ranks, plugin) in enumerate(legs[1:], 2):
        settings = (f"plugin={plugin}", f"cluster.procs_per_node={ranks}")
        if plugin == "fsdp-hybrid":
            settings += ("plugin.shard_size=1",)
        result = colotrain("resume", "parted", *settings, f"train.max_steps={3 * leg}", "--json")
        assert result.code == 0, result.err
    assert ledger(colotrain, "parted") == ledger(colotrain, "straight")
    assert losses(result.json) == pytest.approx(losses(straight), abs=1e-5)
    assert len(losses(straight)) == 12


PLANTED = """
import torch
from torch import nn

BAD = 4 * 16 + 3  # in the fifth global batch

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def data():
    g = torch.Generator().manual_seed(0)
    samples = [{"x": torch.randn(4, generator=g)} for _ in range(400)]
    samples[BAD]["x"][2] = float("nan")
    return samples

def all_bad():
    samples = data()
    for sample in samples[BAD:]:
        sample["x"][0] = float("inf")
    return samples
"""
ROLLBACK = (
    "model.target=planted:Model",
    "train.global_batch=16",
    "train.micro_batch=2",
    "cluster.procs_per_node=2",
    "data.shuffle=false",
    "train.on_nonfinite=rollback",
    "train.max_steps=8",
    "plugin=zero2",
    "name=back",
)


def test_a_rollback_goes_on_past_the_batches_since_the_last_checkpoint(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "planted.py").write_text(PLANTED)
    settings = ("data.target=planted:data", "checkpoint.every=3", CONSTANT)
    summary = colotrain.run(*ROLLBACK, *settings)
    assert (summary["steps"], summary["optimizer_steps"], summary["restarts"]) == (8, 8, 0)
    batches = {step: ids[0] // 16 for step, ids in ledger(colotrain, "back").items()}
    # steps 1 to 3 are saved; the fifth batch is bad, so that of steps 4 and 5 are passed over
    assert {step: batches[step] for step in (1, 2, 3)} == {1: 0, 2: 1, 3: 2}
    [event] = [e for e in colotrain.events("back") if e.kind == "rollback"]
    assert (event.fields["step"], event.fields["left_at"]) == (3, 5)
    last = [e for e in colotrain.events("back") if e.kind == "step" and e.rank == 0][-5:]
    assert [e.fields["samples"][0] // 16 for e in last] == [5, 6, 7, 8, 9]
    assert [loss for _, loss in summary["loss"]["history"]] == pytest.approx(
        [e.fields["loss"] for e in colotrain.events("back") if e.kind == "step" and e.rank == 0][:3]
        + [e.fields["loss"] for e in last]
    )


def test_rollbacks_are_bounded(colotrain: Colotrain) -> None:
    (colotrain.cwd / "planted.py").write_text(PLANTED)
    settings = ("data.target=planted:all_bad", "checkpoint.every=3", "train.max_rollbacks=2")
    result = colotrain("run", *ROLLBACK, *settings)
    assert result.code == 1
    [error] = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert "not finite again after 2 rollbacks" in error
    assert len([e for e in colotrain.events("back") if e.kind == "rollback"]) == 2


SPOILS = """
import torch

def weights(model, step):
    if step == 3:
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.numel():
                local.detach().view(-1)[0] = float("nan")
"""


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "planted.py").write_text(PLANTED)
    (colotrain.cwd / "spoils.py").write_text(SPOILS)
    settings = ("data.target=planted:data", "train.on_gradients=spoils:weights")
    settings += ("checkpoint.every=1", "checkpoint.keep=1", "train.on_nonfinite=stop")
    result = colotrain("run", *ROLLBACK, *settings)
    assert result.code == 1
    failed = [e for e in colotrain.events("back") if e.kind == "checkpoint_failed"]
    assert [e.fields["step"] for e in failed] == [4]
    assert "holds values that are not finite" in failed[0].fields["error"]
    assert [p.name for p in colotrain.rundir("back").checkpoints.iterdir()] == ["step-00000003"]


def test_rolling_back_needs_something_to_go_back_to(colotrain: Colotrain) -> None:
    (colotrain.cwd / "planted.py").write_text(PLANTED)
    result = colotrain("plan", *ROLLBACK, "data.target=planted:data", "checkpoint.every=null")
    assert result.code == 2
    assert "checkpoint.every" in result.err


SLOW = """
import time
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(800, 800) for _ in range(3))

    def forward(self, x, target):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(x, target)

def data():
    import torch
    g = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(800, generator=g), "target": torch.randint(800, (), generator=g)}
        for _ in range(100)
    ]

def writes(model, step):
    from colotrain.engine.state import shard_file

    if not hasattr(shard_file, "write_at_once"):
        shard_file.write_at_once = write = shard_file._write_all

        def slowly(handle, data):
            time.sleep(0.2)
            write(handle, data)

        shard_file._write_all = slowly
"""


@pytest.mark.parametrize("plugin", ["zero1", "zero3"])
def test_updates_made_while_a_checkpoint_is_written_are_not_in_it(
    colotrain: Colotrain, plugin: str
) -> None:
    (colotrain.cwd / "slow.py").write_text(SLOW)
    plan = (
        *("model.target=slow:Model", "data.target=slow:data", f"plugin={plugin}"),
        *("train.global_batch=4", "train.micro_batch=2", "cluster.procs_per_node=2"),
        *("train.max_steps=6", "checkpoint.every=3", "checkpoint.keep=9"),
    )
    colotrain.run(*plan, "name=still", "checkpoint.async=false")
    colotrain.run(*plan, "name=slow", "train.on_gradients=slow:writes")
    saves = [e for e in colotrain.events("slow") if e.kind == "checkpoint"]
    times = {e.fields["step"]: e.t for e in colotrain.events("slow") if e.kind == "step"}
    assert saves[0].t > times[4], "the update after the save came before it was written"
    for step in (3, 6):
        expected, found = (
            read_whole(colotrain.rundir(name).checkpoint(step)) for name in ("still", "slow")
        )
        assert expected.keys() == found.keys()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
