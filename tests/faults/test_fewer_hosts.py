"""A run that loses a host for good goes on from the copies of all ranks, as from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.audited_many import free_port
from tests.faults.test_faults import environment
from tests.running import SMALL, Colotrain, losses

pytestmark = pytest.mark.timeout(1800)  # seconds, of a busy machine

STEPS, LOST_IN = 8, 6
PLAN = (
    *SMALL,
    f"train.max_steps={STEPS}",
    "train.eval_every=4",
    "cluster.procs_per_node=1",
    "elastic.memory_copy=1GiB",
    "train.on_gradients=tests.faults.plant:nothing",
)


def on_two(cwd: Path, name: str, *settings: str, **order: object) -> list[float]:
    """The losses of a run with two launchers, the second of which may be lost."""
    head = f"cluster.rdzv_endpoint=127.0.0.1:{free_port()}"
    shared = (*PLAN, *settings, f"name={name}", "cluster.nodes=2", "elastic.min_nodes=1", head)
    env = environment(**order)
    started = [
        Colotrain(cwd).start("run", *shared, f"cluster.node_rank={node}", "--json", env=env)
        for node in (0, 1)
    ]
    out, err = started[0].communicate(timeout=300)
    assert started[0].returncode == 0, err
    started[1].communicate(timeout=300)
    return losses(json.loads(out))


def check(colotrain: Colotrain, *settings: str, lost: int = 1) -> None:
    """Nothing that was finished is lost, and all goes on as from a checkpoint of that step.

    `lost` is a rank of the host that is lost.
    """
    saved_all = ("checkpoint.every=1", f"checkpoint.keep={STEPS}")
    calm = on_two(colotrain.cwd, "calm", *settings, *saved_all)
    order = {"what": "kill_host", "rank": lost, "step": LOST_IN}
    hurt = on_two(colotrain.cwd, "hurt", *settings, "checkpoint.every=0", **order)
    resumed = [e.fields for e in colotrain.events("hurt") if e.kind == "resumed"]
    assert [(f["step"], f.get("in_memory")) for f in resumed] == [(LOST_IN - 1, True)]
    saved = colotrain.rundir("calm").checkpoint(LOST_IN - 1)
    one = (*PLAN, *settings, "cluster.nodes=1", f"checkpoint.resume={saved}", "name=disk")
    from_disk = colotrain("run", *one, "checkpoint.every=0", "--json", env=environment())
    assert from_disk.code == 0, from_disk.err
    assert hurt == [*calm[: LOST_IN - 1], *losses(from_disk.json)]


def test_one_host_goes_on_from_the_copies_of_two(colotrain: Colotrain) -> None:
    check(colotrain, "plugin=zero3")


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["zero1", "zero2", "fsdp-hybrid", "gemini"])
def test_every_plugin_goes_on_as_from_a_checkpoint(colotrain: Colotrain, plugin: str) -> None:
    check(colotrain, f"plugin={plugin}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("plugin=zero2", "train.precision=fp16"),
        ("plugin=zero3", "optim.name=adafactor"),
        ("plugin=zero3", "freeze.patterns=['embed.*']", "freeze.unfreeze={7: ['embed.*']}"),
    ],
    ids=["fp16", "adafactor", "frozen"],
)
def test_what_else_is_kept(colotrain: Colotrain, settings: tuple[str, ...]) -> None:
    """The loss scale, state of other shapes, and parameters that do not train yet."""
    check(colotrain, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["mesh.tp", "mesh.pp"])
def test_parts_of_matrices_and_stages_are_kept(colotrain: Colotrain, axis: str) -> None:
    check(colotrain, "plugin=zero2", "cluster.procs_per_node=2", f"{axis}=2", lost=2)
