"""gemini beside a GPU: what exceeds the device's budget rests on the host, the run is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_run import losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BASE = (*SMALL, "cluster.procs_per_node=1", "cluster.device=cuda", "plugin=gemini")
WIDE = ("model.args.d_model=1024", "model.args.d_hidden=2816", "model.args.num_heads=8")
"""States of 0.8 GB: far above the workspaces of cuBLAS (32 MiB for each handle and stream)."""


@pytest.fixture
def colotrain(tmp_path: Path) -> Colotrain:
    return Colotrain(tmp_path)


@pytest.mark.parametrize(
    ("model", "budget", "lowered"),
    [
        (("model.args.d_model=64",), "plugin.budget.device=0.9", {"device"}),
        (WIDE, "plugin.budget.device=280MiB", {"host"}),
    ],
)
def test_the_losses_are_those_of_a_run_on_the_device(
    colotrain: Colotrain, model: tuple[str, ...], budget: str, lowered: set[str]
) -> None:
    always = (*BASE, *model, "train.max_steps=5")
    device = colotrain.run(*always, "name=device")
    tiered = colotrain.run(*always, "name=tiered", budget)
    assert losses(tiered) == pytest.approx(losses(device), abs=1e-5)
    placed = [e for e in colotrain.events("tiered") if e.kind == "tiers"][-1]
    assert set(placed.fields["bytes"]["optimizer"]) & lowered


def test_the_disk_takes_what_the_host_may_not(colotrain: Colotrain) -> None:
    always = (*BASE, *WIDE, "train.max_steps=5")
    device = colotrain.run(*always, "name=device")
    small = ("plugin.budget.device=280MiB", "plugin.budget.host=100MiB")
    folder = f"plugin.disk_path={colotrain.cwd / 'disk'}"
    tiered = colotrain.run(*always, *small, folder, "name=tiered")
    assert losses(tiered) == pytest.approx(losses(device), abs=1e-5)
    assert list((colotrain.cwd / "disk").iterdir()) == []
