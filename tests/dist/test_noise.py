"""Gradient noise: the same under every plugin as from single gradients in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from colotrain.data.read.loader import SampleOrder, open_samples, stack
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.recording import GradientRecords
from colotrain.models.loading import build_whole
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_run import losses
from tests.representatives import representatives

FROZEN = "freeze.patterns=[blocks.0.*]"
CUT = (*SMALL, FROZEN, "train.global_batch=8", "train.micro_batch=2")  # 2 ranks × 2 micro-batches


def single_gradients(plan: RunPlan) -> list[dict[str, Tensor]]:
    """The gradient of each micro-batch of the first step alone, in float64."""
    model = build_whole(plan.model, seed=plan.train.seed).double()
    samples = open_samples(plan.data, "train")
    order = SampleOrder(len(samples), seed=plan.train.seed, shuffle=plan.data.shuffle)
    ids = order.samples_at(range(plan.batch.global_batch))
    size, found = plan.batch.micro_batch, []
    for start in range(0, len(ids), size):
        model.zero_grad()
        part = ids[start : start + size]
        loss_sum, count = model(**stack([(i, samples[i]) for i in part]))
        (loss_sum / count).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
    return found


def expected(singles: list[Tensor], samples: int) -> tuple[float, float]:
    """(noise scale, mean cosine) from the samples' covariance and from inner products."""
    n, rows = len(singles), torch.stack([g.flatten() for g in singles])
    mean = rows.mean(0)
    covariance = (rows - mean).square().sum() / (n - 1)  # trace; of means of `samples` samples
    signal = mean.square().sum() - covariance / n
    products, lengths = rows @ rows.T, rows.norm(dim=1)
    off = ~torch.eye(n, dtype=torch.bool)
    cosine = products[off].sum() / torch.outer(lengths, lengths)[off].sum()
    return (samples * covariance / signal).item(), cosine.item()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPlan, list[dict[str, Tensor]]]:
    colotrain = Colotrain(tmp_path_factory.mktemp("reference"))
    colotrain.run(*CUT, "train.max_steps=1", "checkpoint.every=0", "name=plan")
    plan = colotrain.rundir("plan").plan()
    return plan, single_gradients(plan)


@pytest.mark.parametrize("plugin", representatives(ROWS, kept=["zero1", "fsdp-hybrid"]))
def test_noise_is_that_of_single_gradients_in_one_process(
    colotrain: Colotrain, reference: tuple[RunPlan, list[dict[str, Tensor]]], plugin: str
) -> None:
    result = colotrain("inspect-grads", *CUT, f"plugin={plugin}", "--noise", "--json")
    assert result.code == 0, result.err
    noise: dict[str, Any] = result.json["noise"]
    plan, singles = reference
    trained = [name for name in singles[0] if not name.startswith("blocks.0.")]
    whole = [torch.cat([single[name].flatten() for name in trained]) for single in singles]
    assert (noise["micro_batches"], noise["samples"]) == (4, plan.batch.micro_batch)
    scale, cosine = expected(whole, plan.batch.micro_batch)
    assert noise["scale"] == pytest.approx(scale, rel=1e-3)
    assert noise["cosine"] == pytest.approx(cosine, abs=1e-4)
    for name, single in singles[0].items():
        found = noise["parameters"][name]
        if name not in trained:
            assert found == {"scale": None, "cosine": None}
            continue
        scale, cosine = expected([s[name] for s in singles], plan.batch.micro_batch)
        assert found["cosine"] == pytest.approx(cosine, abs=2e-3), (name, single.shape)
        if 0 < scale < 100:  # beyond that the signal is lost in rounding, too
            assert found["scale"] == pytest.approx(scale, rel=2e-2), name


def test_measuring_noise_does_not_change_the_run(colotrain: Colotrain) -> None:
    settings = (*CUT, "train.max_steps=3", "plugin=zero1", "observe.grads_every=0")
    plain = colotrain.run(*settings, "name=plain")
    colotrain.rundir("asked").create()
    colotrain.rundir("asked").request_grads(noise=True)
    asked = colotrain.run(*settings, "name=asked")
    records = [e for e in colotrain.events("asked") if e.kind == "gradients"]
    assert [e.fields["step"] for e in records] == [1]
    assert records[0].fields["noise"]["scale"] > 0
    assert losses(asked) == losses(plain)
    assert asked["micro_batches"] == plain["micro_batches"]


DOUBLE = """
import torch
from torch import nn


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x):
        return self.layer(x).square().mean()


def samples(split="train"):
    draw = torch.Generator().manual_seed(0)
    return [{"x": row} for row in torch.randn(32, 4, generator=draw, dtype=torch.float64)]
"""
OWN = (
    "model.target=own_double:Double", "data.target=own_double:samples", "train.global_batch=8",
    "train.micro_batch=2", "train.max_steps=3", "train.eval_steps=0", "cluster.procs_per_node=1",
)  # fmt: skip


def test_noise_of_a_model_in_double_precision(colotrain: Colotrain) -> None:
    (colotrain.cwd / "own_double.py").write_text(DOUBLE)
    result = colotrain("inspect-grads", *OWN, "--noise", "--json")
    assert result.code == 0, result.err
    assert result.json["noise"]["scale"] > 0


def test_a_request_that_fails_is_not_asked_for_again(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "asked")
    rundir.create()
    rundir.request_grads(noise=True)
    records = GradientRecords(
        cast(Any, SimpleNamespace(rank=0, rundir=rundir)), StepClock(torch.device("cpu"))
    )
    assert records.asks()["noise"].value
    records.has_begun = True
    batches = SimpleNamespace(again=Mock(side_effect=ValueError("a second pass")))
    agreed = Mock(__getitem__=lambda *_: True, finite=True, batches=batches)
    with pytest.raises(ValueError, match="a second pass"):
        records.before_update(agreed)
    assert rundir.grads_request() is None


def test_a_step_of_one_micro_batch_has_no_noise_to_measure(colotrain: Colotrain) -> None:
    alone = ("cluster.procs_per_node=1", "train.global_batch=2", "train.micro_batch=2")
    result = colotrain("inspect-grads", *SMALL, *alone, "--noise")
    assert result.code == 2
    assert "one micro-batch of 2" in result.err
