"""gemini's tiers: whatever rests on disk, the run is the same to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.runs.resolving import plan_from
from colotrain.verify.compare import Tolerance
from colotrain.verify.runner import verify
from tests.checkpoints import read_whole
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_contracts import watched
from tests.dist.test_run import losses, pid_of, wait_for_step
from tests.representatives import representatives

BASE = (*SMALL, "plugin=gemini", "optim.schedule.name=constant", "train.max_steps=4")
LORA_LIKE = ("freeze.patterns=[*]", "freeze.except=[blocks.*.attention.*]")
CASES = {
    "plain": (),
    "accumulation 4": ("train.global_batch=16",),
    "frozen prefix": ("freeze.patterns=[embed*,blocks.0.*]",),
    "scattered trainable tensors": LORA_LIKE,
    "unfreezing": ("freeze.patterns=[embed*]", "freeze.unfreeze={2:[embed*]}"),
    "evaluation in between": ("train.eval_every=1",),
    "split blocks": ("plugin.chunk_size=8KiB",),
    "one group per block": ("plugin.chunk_size=40KiB",),
    "activation checkpointing": ("train.activation_checkpointing=full",),
    "selective recomputation": ("train.activation_checkpointing=selective",),
    "half precision": ("train.precision=bf16",),
    "momentum": ("optim.name=sgd", "optim.lr=0.1"),
    "moments of 8 bits": ("optim.name=adamw8bit", "model.args.d_model=72"),
    "odd shapes on three ranks": (
        "cluster.procs_per_node=3",
        "train.global_batch=12",
        "model.args.d_hidden=70",
    ),
    "one rank": ("cluster.procs_per_node=1",),
}
KEPT = (
    "accumulation 4",
    "unfreezing",
    "split blocks",
    "half precision",
    "odd shapes on three ranks",
)
"""Cases that `make test` has."""


def on_disk(colotrain: Colotrain, host: str = "1MiB") -> tuple[str, str]:
    """Budgets so small that every byte of the model rests on disk."""
    return f"plugin.disk_path={colotrain.cwd / 'disk'}", f"plugin.budget.host={host}"


def tiers(colotrain: Colotrain, name: str) -> list[dict[str, Any]]:
    return [e.fields for e in colotrain.events(name) if e.kind == "tiers" and e.rank == 0]


def assert_all_on_disk(colotrain: Colotrain, name: str) -> None:
    for placed in (e.fields for e in colotrain.events(name) if e.kind == "tiers"):
        for kind, sizes in placed["bytes"].items():
            assert set(sizes) <= {"disk"}, kind


def last_state(colotrain: Colotrain, name: str, step: int) -> dict[str, torch.Tensor]:
    state = read_whole(colotrain.rundir(name).checkpoint(step))
    return {name: tensor for name, tensor in state.items() if not name.startswith("rng")}


def assert_same_state(colotrain: Colotrain, one: str, two: str, step: int = 4) -> None:
    mine, its = (last_state(colotrain, name, step) for name in (one, two))
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name


@pytest.mark.parametrize("case", representatives(CASES, kept=KEPT))
def test_a_run_from_disk_is_bit_identical_to_one_in_memory(colotrain: Colotrain, case: str) -> None:
    always = (*BASE, *CASES[case], "observe.grads_every=2")
    memory = colotrain.run(*always, "name=memory")
    disk = colotrain.run(*always, "name=disk", *on_disk(colotrain))
    assert losses(disk) == losses(memory)
    assert disk["optimizer_steps"] == memory["optimizer_steps"] == 4
    assert_same_state(colotrain, "disk", "memory")
    records = [
        [e.fields for e in colotrain.events(name) if e.kind == "gradients"]
        for name in ("memory", "disk")
    ]
    assert len(records[0]) == 2
    assert records[0] == records[1]
    assert_all_on_disk(colotrain, "disk")
    assert disk["memory"]["tiers"]["parameters"].keys() == {"disk"}
    assert list((colotrain.cwd / "disk").iterdir()) == []


def test_a_run_from_disk_has_the_losses_of_the_other_plugins(colotrain: Colotrain) -> None:
    disk = colotrain.run(*BASE, *on_disk(colotrain))
    other = colotrain.run(*BASE, "plugin=zero1")
    assert losses(disk) == pytest.approx(losses(other), abs=1e-4)


def test_gradients_on_disk_are_read_like_any_others(colotrain: Colotrain) -> None:
    ways = (), on_disk(colotrain)
    seen = [watched(colotrain, "plugin=gemini", "train.max_steps=2", *way) for way in ways]
    assert seen[0] == seen[1]


def test_resume_goes_on_exactly_with_another_budget_and_under_another_plugin(
    colotrain: Colotrain,
) -> None:
    straight = colotrain.run(*BASE, "name=straight")
    disk = on_disk(colotrain)
    for name, first, then in (
        ("down", (), disk),
        ("up", disk, ("plugin.disk_path=null", "plugin.budget.host=auto")),
        ("across", disk, ("plugin=zero2",)),
    ):
        colotrain.run(*BASE, *first, f"name={name}", "train.max_steps=2")
        resumed = colotrain("resume", name, "train.max_steps=4", *then, "--json")
        assert resumed.code == 0, resumed.err
        if name == "across":
            assert losses(resumed.json) == pytest.approx(losses(straight), abs=1e-5)
        else:
            assert losses(resumed.json) == losses(straight), name
            assert_same_state(colotrain, name, "straight")


def test_after_kill_9_nothing_is_left_and_the_run_goes_on_exactly(
    colotrain: Colotrain, started: Callable[[subprocess.Popen], subprocess.Popen]
) -> None:
    twenty = (*BASE, "train.max_steps=12", "checkpoint.every=4")
    straight = colotrain.run(*twenty, "name=straight")
    process = started(colotrain.start("run", *twenty, *on_disk(colotrain), "name=hurt"))
    wait_for_step(colotrain, "hurt", 5)
    workers = [pid_of(colotrain, "hurt", rank) for rank in (0, 1)]
    assert all(holds_nameless_files(pid) for pid in workers)
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert list((colotrain.cwd / "disk").iterdir()) == []
    resumed = colotrain("resume", "hurt", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == losses(straight)


def holds_nameless_files(pid: int) -> bool:
    targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return any("/disk/" in target and target.endswith("(deleted)") for target in targets)


def test_what_cannot_be_is_one_clear_line_before_training(colotrain: Colotrain) -> None:
    (colotrain.cwd / "file").touch()
    for settings, line in (
        ((f"plugin.disk_path={colotrain.cwd / 'file' / 'x'}",), "folder"),
        (("plugin.disk_path=/dev/shm/x",), "is tmpfs, which is memory itself"),
        (("plugin.budget.host=1000",), "for the largest group at work"),
        ((*on_disk(colotrain), "plugin.budget.disk=4KiB"), "plugin.budget.disk"),
    ):
        result = colotrain("run", *BASE, *settings)
        assert result.code == 2, result.err
        assert line in result.err
        assert not list(colotrain.cwd.glob("runs/*/events/rank*"))


GROWS = """
held = []

def on_gradients(model, step):
    if step == 2:
        import torch
        held.append(torch.ones(300 << 20))
"""


def test_a_run_that_runs_short_of_memory_lowers_what_it_holds_and_goes_on_the_same(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "grows.py").write_text(GROWS)
    folder = f"plugin.disk_path={colotrain.cwd / 'disk'}"
    always = (*BASE, "train.max_steps=6", "train.on_gradients=grows:on_gradients")
    roomy = colotrain.run(*always, "name=roomy")
    short = colotrain.run(*always, "name=short", folder, "plugin.budget.host=1GiB")
    assert losses(short) == losses(roomy)
    steps = [(t["step"], set(t["bytes"]["optimizer"])) for t in tiers(colotrain, "short")]
    assert steps[0] == (0, {"host"})
    assert steps[-1] == (3, {"disk"})
    assert_same_state(colotrain, "short", "roomy", step=6)


def test_a_disk_that_cannot_take_more_ends_a_saved_run(colotrain: Colotrain) -> None:
    (colotrain.cwd / "grows.py").write_text(GROWS)
    tight = (f"plugin.disk_path={colotrain.cwd / 'disk'}", "plugin.budget.disk=4KiB")
    always = (*BASE, "train.max_steps=6", "train.on_gradients=grows:on_gradients")
    result = colotrain("run", *always, *tight, "plugin.budget.host=1GiB", "name=full")
    assert result.code == 1, result.err
    assert "plugin.budget.disk" in result.err
    assert colotrain.rundir("full").checkpoint(3).is_dir()
    assert list(colotrain.cwd.glob("disk/*")) == []


def test_the_plan_shows_groups_and_tiers(colotrain: Colotrain) -> None:
    result = colotrain("plan", *BASE, *on_disk(colotrain), "--json")
    document = json.loads(result.out)
    assert document["tiers"]["bytes"]["optimizer"].keys() == {"disk"}
    assert document["tiers"]["moved_bytes"] > 0
    assert (
        sum(document["groups"]["bytes"]) + document["groups"]["rest"]
        == 4 * (document["parameters"]["total"])
    )
    assert "moved" in colotrain("plan", *BASE, *on_disk(colotrain)).out


def test_with_room_for_everything_nothing_is_placed_lower(colotrain: Colotrain) -> None:
    folder = f"plugin.disk_path={colotrain.cwd / 'disk'}"
    summary = colotrain.run(*BASE, folder, "name=roomy", "plugin.budget.host=2GiB")
    assert {t for sizes in summary["memory"]["tiers"].values() for t in sizes} == {"host"}
    assert not (colotrain.cwd / "disk").exists()


STAGES = (
    *("mesh.pp=2", "model.args.num_layers=4", "train.grad_clip=0.1"),
    *("optim.schedule.name=constant", "plugin=gemini", "train.max_steps=4"),
)
STAGED = {
    "tied": ("model.args.tie_embeddings=true",),
    "a frozen stage": ("freeze.patterns=[embed*,blocks.0.*,blocks.1.*]", "mesh.pp_split=[2,2]"),
    "interleaved, unfreezing, two ranks each": (
        *("mesh.pp_schedule=interleaved", "cluster.procs_per_node=4", "train.micro_batch=1"),
        *("freeze.patterns=[embed*,blocks.0.*]", "freeze.unfreeze={2:[embed*]}"),
        "train.eval_every=1",
    ),
}


@pytest.mark.parametrize("case", representatives(STAGED, kept=["tied"]))
def test_stages_from_disk_equal_one_process(
    case: str, colotrain: Colotrain, tmp_path: Path
) -> None:
    words = (*SMALL, *STAGES, *STAGED[case], *on_disk(colotrain), "checkpoint.every=0")
    (result,) = verify([plan_from(words)], tmp_path, tolerance=Tolerance(parameter=1e-5))
    assert result.passed, result.difference


@pytest.mark.parametrize("case", representatives(STAGED, kept=["a frozen stage"]))
def test_stages_from_disk_go_on_as_in_memory(case: str, colotrain: Colotrain) -> None:
    words = (*SMALL, *STAGES, *STAGED[case], "observe.grads_every=2")
    memory = colotrain.run(*words, "name=memory")
    colotrain.run(*words, *on_disk(colotrain), "name=disk", "train.max_steps=2")
    document = json.loads(colotrain("plan", *words, *on_disk(colotrain), "--json").out)
    planned = [stage["bytes"] for stage in document["pipeline"]["tiers"]]
    begun = [e.fields["bytes"] for e in colotrain.events("disk") if e.kind == "tiers"]
    assert all(placed in planned for placed in begun)
    assert len(begun) == 4
    disk = colotrain.resume("disk", "train.max_steps=4")
    assert losses(disk) == losses(memory)
    assert disk["optimizer_steps"] == memory["optimizer_steps"] == 4
    assert_same_state(colotrain, "disk", "memory")
    records = [
        [e.fields for e in colotrain.events(name) if e.kind == "gradients"]
        for name in ("memory", "disk")
    ]
    assert records[0] == records[1]
    assert_all_on_disk(colotrain, "disk")


GROWS_ON_THE_LAST = """
from pathlib import Path

import torch
from colotrain.engine.gradients.gradients import read

held = []

def on_gradients(model, step):
    views = [(view.name, view.full().double().sum().item()) for view in read(model)]
    if torch.distributed.get_rank() == 0:
        with Path(__file__).with_suffix(".txt").open("a") as file:
            print(step, views, file=file)
    elif step == 2:
        held.append(torch.ones(300 << 20))
"""


def test_a_stage_that_runs_short_lowers_its_own_alone(colotrain: Colotrain) -> None:
    (colotrain.cwd / "grows_on_the_last.py").write_text(GROWS_ON_THE_LAST)
    folder = f"plugin.disk_path={colotrain.cwd / 'disk'}"
    always = (*SMALL, *STAGES, "train.on_gradients=grows_on_the_last:on_gradients")
    roomy = colotrain.run(*always, "name=roomy")
    short = colotrain.run(*always, "name=short", folder, "plugin.budget.host=1GiB")
    assert losses(short) == losses(roomy)
    lines = (colotrain.cwd / "grows_on_the_last.txt").read_text().splitlines()
    assert lines[:4] == lines[4:]
    assert len(lines) == 8
    placed = {
        rank: [e for e in colotrain.events("short") if e.kind == "tiers" and e.rank == rank]
        for rank in (0, 1)
    }
    assert {tier for e in placed[0] for n in e.fields["bytes"].values() for tier in n} == {"host"}
    assert set(placed[1][-1].fields["bytes"]["optimizer"]) == {"disk"}
    assert_same_state(colotrain, "short", "roomy")
