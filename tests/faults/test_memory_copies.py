"""Workers that die or hang go on from their launcher's memory, and lose no finished step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kills import processes, wait_until_gone
from tests.faults.test_faults import environment
from tests.running import SMALL, Colotrain, Result, losses

pytestmark = pytest.mark.timeout(1800)  # seconds, of a busy machine

PLAN = (
    *SMALL,
    "train.max_steps=9",
    "train.eval_every=3",
    "train.stop_early.metric=validation_loss",
    "checkpoint.every=8",
    "elastic.memory_copy=1GiB",
    "elastic.check_every=2",
    "name=hurt",
    "train.on_gradients=tests.faults.plant:nothing",
)
WITHIN_A_COPY = """
import os, signal
from tests.faults import plant

def torn(model, step):
    if step + 1 == 6 and os.environ["RANK"] == "1" and plant.once():
        from colotrain.engine.state import memory_file
        write = memory_file._write_all

        def first_only(handle, data, at):
            write(handle, data, at)
            os.kill(os.getpid(), signal.SIGKILL)

        memory_file._write_all = first_only
"""


@pytest.fixture(autouse=True)
def nothing_is_left(colotrain: Colotrain) -> Iterator[None]:
    yield
    wait_until_gone(colotrain.cwd)
    assert not [path for path in Path("/dev/shm").iterdir() if "colotrain" in path.name]
    assert not processes(colotrain.cwd)


def run(colotrain: Colotrain, *settings: str, **order: object) -> Result:
    result = colotrain("run", *PLAN, *settings, "--json", env=environment(**order))
    assert result.code == 0, result.err
    return result


def resumed(colotrain: Colotrain) -> list[tuple[int, bool]]:
    found = [e.fields for e in colotrain.events("hurt") if e.kind == "resumed"]
    return [(fields["step"], bool(fields.get("in_memory"))) for fields in found]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(run(Colotrain(tmp_path_factory.mktemp("straight")), "plugin=zero2").json)


def test_a_killed_rank_costs_the_step_in_flight_alone(
    colotrain: Colotrain, straight: list[float]
) -> None:
    result = run(colotrain, "plugin=zero2", what="kill", rank=1, step=6)
    assert resumed(colotrain) == [(5, True)]
    assert losses(result.json) == straight


def test_a_copy_that_a_rank_did_not_finish_is_passed_over(
    colotrain: Colotrain, straight: list[float]
) -> None:
    (colotrain.cwd / "within.py").write_text(WITHIN_A_COPY)
    result = run(colotrain, "plugin=zero2", "train.on_gradients=within:torn")
    assert resumed(colotrain) == [(5, True)]
    assert losses(result.json) == straight


@pytest.mark.slow
def test_a_newer_checkpoint_is_preferred_to_an_older_copy(
    colotrain: Colotrain, straight: list[float]
) -> None:
    """Copies that are made seldom; here none is, after the first."""
    (colotrain.cwd / "seldom.py").write_text(
        "from tests.faults import plant\n"
        "from colotrain.engine.state.memory_copy import MemoryCopies\n"
        "MemoryCopies.is_due = lambda self, step: step == 1\n"
        "def planted(model, step):\n    plant.nothing(model, step)\n"
    )
    settings = ("plugin=zero2", "train.on_gradients=seldom:planted", "checkpoint.every=4")
    result = run(colotrain, *settings, "checkpoint.async=false", what="kill", rank=0, step=7)
    assert resumed(colotrain) == [(4, False)]
    assert losses(result.json) == straight


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["zero1", "zero3", "fsdp-hybrid", "gemini"])
def test_every_plugin_goes_on_bit_equal_without_any_checkpoint(
    colotrain: Colotrain, tmp_path: Path, plugin: str
) -> None:
    settings = [f"plugin={plugin}", "checkpoint.every=0", "train.stop_early.metric=null"]
    settings += ["plugin.shard_size=1"] if plugin == "fsdp-hybrid" else []
    (tmp_path / "undisturbed").mkdir()
    expected = run(Colotrain(tmp_path / "undisturbed"), *settings)
    result = run(colotrain, *settings, what="kill", rank=0, step=4)
    assert resumed(colotrain) == [(3, True)]
    assert losses(result.json) == losses(expected.json)


@pytest.mark.slow
def test_a_hung_rank_is_replaced_from_memory(colotrain: Colotrain, straight: list[float]) -> None:
    bounded = "elastic.hang_timeout_s=10"
    result = run(colotrain, "plugin=zero2", bounded, what="hang", rank=1, step=6)
    assert resumed(colotrain) == [(5, True)]
    assert losses(result.json) == straight


@pytest.mark.slow
def test_a_checkpoint_in_which_a_rank_died_is_made_up_for(
    colotrain: Colotrain, straight: list[float]
) -> None:
    (colotrain.cwd / "dies.py").write_text(
        "import os, signal\n"
        "from colotrain.engine.state import checkpoint\n"
        "from tests.faults import plant\n"
        "save = checkpoint.save\n"
        "def planted(model, step):\n    plant.nothing(model, step)\n"
        "def dies(run):\n"
        "    if run.step == 8 and run.rank == 1 and plant.once():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save(run)\n"
        "checkpoint.save = dies\n"
    )
    settings = ("plugin=zero2", "train.on_gradients=dies:planted", "train.max_steps=9")
    result = run(colotrain, *settings)
    assert resumed(colotrain) == [(8, True)]
    assert losses(result.json) == straight
    saved = {path.name for path in (colotrain.cwd / "runs/hurt/checkpoints").iterdir()}
    assert {"step-00000008", "step-00000009"} <= saved


LONG_STEP = """
import os, time
from colotrain.engine.step.batches import Batches
from tests.faults import plant

fetch = Batches.__iter__

def slowly(self):
    for batch in fetch(self):
        if self.run.step + 1 == 6 and self.run.rank == 0 and not os.path.exists("slow"):
            open("slow", "w").close()
            time.sleep(600)
        elif self.run.step + 1 == 6 and self.run.rank == 1 and plant.once():
            while not os.path.exists("slow"):
                time.sleep(0.01)
            plant.kill(None)
        yield batch

Batches.__iter__ = slowly

def planted(model, step):
    pass
"""


def test_a_rank_in_a_long_step_is_not_waited_for(
    colotrain: Colotrain, straight: list[float]
) -> None:
    """Its step cannot end without the killed rank, which alone is named."""
    (colotrain.cwd / "long_step.py").write_text(LONG_STEP)
    result = run(colotrain, "plugin=zero2", "train.on_gradients=long_step:planted")
    assert resumed(colotrain) == [(5, True)]
    assert losses(result.json) == straight
    found = colotrain.events("hurt")
    restart = next(event for event in found if event.kind == "restart")
    assert "rank 1 was killed by SIGKILL" in restart.fields["cause"]
    last = max(e.t for e in found if e.kind == "step" and e.t < restart.t)
    assert restart.t - last < 15  # the agent alone would wait for 30 s


def test_a_rank_that_finishes_a_step_is_waited_for(
    colotrain: Colotrain, straight: list[float]
) -> None:
    """Rank 1 is killed as soon as it has copied step 6, which rank 0 copies two seconds later."""
    (colotrain.cwd / "late_copy.py").write_text(
        "import time\n"
        "from colotrain.engine.step import participants\n"
        "from tests.faults import plant\n"
        "copy = participants.copy_to_memory\n"
        "def planted(model, step):\n    pass\n"
        "def late(run, **again):\n"
        "    if run.step == 6 and run.rank == 0 and plant.once():\n        time.sleep(2)\n"
        "    copy(run, **again)\n"
        "    if run.step == 6 and run.rank == 1 and plant.once('killed'):\n"
        "        plant.kill(None)\n"
        "participants.copy_to_memory = late\n"
    )
    result = run(colotrain, "plugin=zero2", "train.on_gradients=late_copy:planted")
    assert resumed(colotrain) == [(6, True)]
    assert losses(result.json) == straight
