"""Schedule-free AdamW: evaluated and exported with the mean, trained on as if nobody had looked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colotrain.errors import ConfigError
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS
from colotrain.verify.runner import verify
from tests.checkpoints import read_whole
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_difficult_models import plan_of
from tests.dist.test_gemini import assert_same_state, on_disk
from tests.dist.test_run import losses

NAME = ("optim.name=schedule_free_adamw", "optim.schedule.name=constant")
WARM = (*NAME, "optim.schedule.warmup_steps=2", "optim.lr=0.02", "train.max_steps=4")


def test_every_plugin_trains_and_evaluates_as_one_process_does(tmp_path: Path) -> None:
    """The evaluation after the last step is compared too: it is with the mean."""
    evaluated = ("data.validation_fraction=0.25", "train.eval_steps=1")
    plans = [plan_of("Stack", plugin, *WARM, *evaluated) for plugin in ROWS]
    results = list(verify(plans, tmp_path))
    wrong = [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert len(results) == len(plans)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("plugin", ["zero2", "gemini"])
def test_evaluations_change_nothing_and_a_run_goes_on_exactly(
    colotrain: Colotrain, plugin: str
) -> None:
    disk = on_disk(colotrain) if plugin == "gemini" else ()
    base = (*SMALL, *WARM, f"plugin={plugin}")
    straight = colotrain.run(*base, "name=straight", "train.eval_every=0")
    often = (*disk, "train.eval_every=1")
    colotrain.run(*base, *often, "train.max_steps=2", "name=half")
    assert losses(colotrain.resume("half", *often, "train.max_steps=4")) == losses(straight)
    assert_same_state(colotrain, "half", "straight")


def test_an_export_is_the_mean_and_another_optimizer_begins_with_it(colotrain: Colotrain) -> None:
    colotrain.run(*SMALL, *WARM, "plugin=zero3", "name=mean")
    result = colotrain("export", "mean", "--to", "out", "--check", "--json")
    assert result.code == 0, result.err
    exported: dict[str, torch.Tensor] = {}
    for file in (colotrain.cwd / "out").glob("*.safetensors"):
        exported |= load_file(file)
    held, moved = read_whole(colotrain.rundir("mean").checkpoint(4)), 0
    means = {}
    for name, tensor in held.items():
        if (z := held.get(f"optim.{name.removeprefix('model.')}.z")) is not None:
            y = tensor.double()
            means[name] = (y - 0.1 * z.double()) / 0.9
            moved += not torch.allclose(means[name], y, rtol=0, atol=1e-4)
    assert moved > 10
    found = sorted(round(t.double().sum().item(), 3) for t in exported.values())
    wanted = sorted(round(t.sum().item(), 3) for t in means.values())
    assert found == pytest.approx(wanted, abs=2e-3)
    other = ("optim.name=sgd", "optim.betas=[0.9]", "optim.lr=1e-12", "train.max_steps=5")
    colotrain.run(*SMALL, *other, f"checkpoint.resume={colotrain.cwd}/runs/mean", "name=other")
    then = read_whole(colotrain.rundir("other").checkpoint(5))
    for name, mean in means.items():
        assert torch.allclose(then[name].double(), mean, rtol=0, atol=1e-6), name


def test_what_a_resumed_run_freezes_stays_at_its_mean(colotrain: Colotrain) -> None:
    """Its z is gone from later checkpoints; what still trains goes on where it was."""
    colotrain.run(*SMALL, *WARM, "plugin=zero2", "name=mean")
    before = read_whole(colotrain.rundir("mean").checkpoint(4))
    settings = ('freeze.patterns=["*mlp*"]', "optim.lr=1e-12", "train.max_steps=5")
    colotrain.resume("mean", *settings)
    after, frozen = read_whole(colotrain.rundir("mean").checkpoint(5)), 0
    for name in (name for name in before if name.startswith("model.")):
        y, state = before[name].double(), f"optim.{name.removeprefix('model.')}.z"
        z = before[state].double()
        if "mlp" not in name:
            assert torch.allclose(after[state].double(), z, atol=1e-7), name
            continue
        mean = (y - 0.1 * z) / 0.9
        assert torch.allclose(after[name].double(), mean, atol=1e-7), name
        frozen += not torch.allclose(y, mean, atol=1e-5)
    assert frozen


def test_a_schedule_that_falls_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.schedule\.name=cosine: expected constant with"):
        plan_from([*SMALL, NAME[0]])
    with pytest.raises(ConfigError, match="expected a first number above 0"):
        plan_from([*SMALL, *NAME, "optim.betas=[0,0.9]"])
