"""Every optimizer under every plugin against one process of plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from colotrain.engine.optim.schedule import schedule
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.errors import ColotrainError, ConfigError
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS
from colotrain.verify.compare import Tolerance
from colotrain.verify.runner import verify
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_difficult_models import plan_of
from tests.dist.test_rounding import CASES, assert_equal, options, state_of
from tests.dist.test_run import losses
from tests.representatives import representatives

RULES = "optim.rules=[{match: '*bias',weight_decay: 0.2},{match: 'layers.1.*',lr_scale: 0.5}]"
WSD = ("optim.schedule.name=wsd", "optim.schedule.decay_steps=2", "optim.schedule.warmup_steps=1")
OPTIMIZERS = {
    "adamw": ("optim.lr=0.01", RULES),
    "sgd": ("optim.betas=[0.9]", *WSD),
    "lion": ("optim.lr=0.003", RULES, *WSD),
    "adafactor": ("optim.lr=0.02", RULES),
    "muon": ("optim.lr=0.02", RULES),
    "torch.optim:NAdam": ("optim.lr=0.01", "+optim.args={betas: [0.8,0.9]}"),
    "torch.optim:Adagrad": ("optim.lr=0.05", RULES),
}


@pytest.mark.parametrize("name", representatives(OPTIMIZERS, kept=["adamw", "adafactor", "muon"]))
def test_an_optimizer_updates_shards_as_it_updates_whole_parameters(
    name: str, tmp_path: Path
) -> None:
    """muon iterates in bfloat16, where a last bit of difference in its input may show."""
    more = (f"optim.name={name}", "train.max_steps=4", *OPTIMIZERS[name])
    plans = [plan_of(model, p, *more) for model in ("Stack", "Tied") for p in ROWS]
    exact = Tolerance(parameter=1e-5)
    loose = Tolerance(loss=1e-4, gradient=1e-3, parameter=2e-3)
    results = list(verify(plans, tmp_path, tolerance=loose if name == "muon" else exact))
    wrong = [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert len(results) == len(plans)
    assert not wrong, "\n".join(wrong)


def test_numbers_that_an_own_optimizer_reads_are_those_of_whole_tensors(tmp_path: Path) -> None:
    own = ("optim.name=tests.dist.own_optimizers:TrustRatio", "optim.lr=0.01")
    plans = [plan_of("Stack", p, *own) for p in ("zero2", "zero3", "gemini")]
    assert [r.difference for r in verify(plans, tmp_path)] == [None, None, None]


@pytest.mark.parametrize("carry", ["true", "false"])
def test_the_rates_that_an_own_optimizer_gives_its_groups_are_kept(
    tmp_path: Path, carry: str
) -> None:
    name = "optim.name=tests.dist.own_optimizers:TwoRates"
    own = (name, f"+optim.args={{carry: {carry}}}", "optim.lr=0.01", "train.max_steps=4", *WSD)
    plans = [plan_of("Stack", p, *own) for p in ("zero1", "zero3")]
    assert [r.difference for r in verify(plans, tmp_path)] == [None, None]


def test_an_own_optimizer_that_gives_parameters_other_memory_is_refused(tmp_path: Path) -> None:
    own = ("optim.name=tests.dist.own_optimizers:Rebinding", "optim.lr=0.01")
    with pytest.raises(ColotrainError, match="its first step changed no parameter"):
        list(verify([plan_of("Stack", "zero3", *own)], tmp_path))


@pytest.mark.parametrize("cases", CASES)
def test_muon_has_the_same_bits_whichever_rank_computes_on_a_matrix(
    colotrain: Colotrain, cases: list[tuple[str, int, int]]
) -> None:
    base = (*options("nearest"), "model.args.halves=false", "optim.name=muon", "optim.lr=0.02")
    alone = ("cluster.procs_per_node=1", "train.micro_batch=8", "plugin=zero2", "name=alone")
    colotrain.run(*base, *alone, "train.max_steps=4")
    wanted = state_of(colotrain, "alone")
    assert sum(key.endswith(".momentum_buffer") for key in wanted) == 4
    for plugin, ranks, micro in cases:
        name = f"{plugin}-{ranks}"
        more = (f"plugin={plugin}", f"cluster.procs_per_node={ranks}", f"train.micro_batch={micro}")
        colotrain.run(*base, *more, f"name={name}", "train.max_steps=2")
        other = ("plugin=zero1", f"cluster.procs_per_node={6 - ranks}", "train.micro_batch=1")
        colotrain.resume(name, *other, "train.max_steps=4")
        assert_equal(state_of(colotrain, name), wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["lion", "muon", "adafactor", "torch.optim:NAdam"])
def test_a_run_goes_on_under_another_plugin_and_world_size(colotrain: Colotrain, name: str) -> None:
    options = (*SMALL, f"optim.name={name}", "optim.lr=0.01", "optim.schedule.name=constant")
    whole = colotrain.run(*options, "plugin=zero2", "train.max_steps=4")
    colotrain.run(*options, "plugin=zero3", "train.max_steps=2", "name=half")
    changes = ("plugin=gemini", "cluster.procs_per_node=1", "train.max_steps=4")
    resumed = colotrain("resume", "half", *changes, "--json")
    assert losses(resumed.json) == pytest.approx(
        losses(whole), abs=2e-3 if name == "muon" else 1e-5
    )


def test_an_optimizer_that_cannot_be_had_is_refused_in_a_line() -> None:
    for overrides, line in [
        (["optim.name=adamv"], "optim.name=adamv: expected one of adamw, sgd, lion, muon, adafac"),
        (["+optim.args={x: 1}"], "optim.args={'x': 1}: expected nothing but for an optimizer of"),
        (["optim.rules=[{match: nothing*}]"], "optim.rules[0].match=nothing*: expected a glob"),
        (["optim.rules=[{match: '*',lr_scale: -0.5}]"], "optim.rules[0].lr_scale=-0.5: expected 0"),
        (["optim.schedule.decay_steps=3"], "optim.schedule.decay_steps=3: expected nothing but"),
    ]:
        with pytest.raises(ConfigError) as caught:
            plan_from([*SMALL, *overrides])
        assert str(caught.value).startswith(line)


def test_wsd_is_constant_and_then_falls_in_a_line() -> None:
    plan = plan_of("Stack", "zero2", *WSD, "optim.schedule.min_lr_ratio=0.0").optim
    assert [schedule(plan, step, 6) for step in range(6)] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    default = plan_of("Stack", "zero2", WSD[0], "optim.schedule.min_lr_ratio=0.5").optim
    rates = [schedule(default, step, 10) for step in range(10)]
    assert rates == pytest.approx([1.0] * 8 + [0.75, 0.5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_updates_parameters_in_half_precision(dtype: torch.dtype) -> None:
    shard = nn.Parameter(torch.ones(64, dtype=dtype))
    shard.grad = torch.ones_like(shard)
    optimizer = ShardOptimizer(plan_of("Stack", "zero1").optim, max_steps=1)
    optimizer.add({"weight": shard})
    optimizer.step(factor=1.0)
    assert torch.equal(shard.detach(), torch.ones_like(shard) - torch.full_like(shard, 0.1))
