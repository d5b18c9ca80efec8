"""Other people's models: trained as in one process of plain torch, or refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.comms.groups import Groups
from colotrain.engine.sharding.grouping import find_groups
from colotrain.engine.sharding.sharded_model import materialise_, reshard, shard_
from colotrain.engine.sharding.shared_parameters import share_parameters
from colotrain.errors import ColotrainError, ConfigError
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist.difficult import samples
from tests.dist.foreign import AT_PLAN, IN_FORWARD, OF_BLOCKS, SAMPLE, TRAIN, make
from tests.dist.test_difficult_models import check, one_reference_for_all_plugins, plan_of
from tests.dist.test_transport import plan_of as tiny_plan
from tests.dist.test_transport import run
from tests.representatives import chosen, half_of_the_day

__all__ = ["one_reference_for_all_plugins"]
GATHERING = "tests.dist.gathering"


def plan(model: str, plugin: str, *overrides: str) -> RunPlan:
    """One micro-batch a step: averages that a forward keeps depend on how often it runs."""
    own = ("model.target=tests.dist.foreign:make", "train.micro_batch=6", "observe.grads_every=1")
    return plan_of(model, plugin, *own, *overrides)


def test_one_of_each_kind_trains_as_in_one_process_where_groups_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.gathering")
    check([plan(model, "zero3") for model in (*SAMPLE, *OF_BLOCKS)], tmp_path)


PAIRS = [(plugin, worker) for plugin in ROWS for worker in (GATHERING, runner.WORKER)]
TRIED = [("zero1", runner.WORKER), ("zero2", GATHERING), ("zero3", runner.WORKER)]
TRIED += [("fsdp-hybrid", GATHERING), ("gemini", runner.WORKER)]


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "worker"), chosen(PAIRS, among=TRIED))
def test_all_do_under_every_plugin(
    plugin: str, worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", worker)
    check([plan(model, plugin) for model in half_of_the_day(TRAIN, of=plugin)], tmp_path)


def test_an_error_of_a_tenth_is_found_in_a_layer_in_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.scales_a_layers_gradient")
    [result] = runner.verify([plan("Autocast", "zero3")], tmp_path)
    assert "gradient of layers.0.linear.weight in step 1" in (result.difference or "")


def test_an_average_beside_the_modules_differs_by_rounding_alone(tmp_path: Path) -> None:
    [result] = check([plan("DoubleEma", "zero1", "train.grad_clip=null")], tmp_path)
    assert 0.0 < result.max_abs_gradient < 1e-14


@pytest.mark.parametrize("model", AT_PLAN)
def test_what_sharding_would_lose_is_refused_when_it_is_planned(model: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(AT_PLAN[model])):
        plan(model, "zero2")


def two_steps(model: nn.Module, batch: dict[str, Tensor]) -> None:
    for _ in range(2):
        model(**batch).backward()


def refuses(rank: int, plans: list[RunPlan]) -> None:
    rows = samples(4, seed=rank)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for name, says in IN_FORWARD.items():
        for plan in plans:
            for shared in (False, True):
                torch.manual_seed(0)
                model = make(name)
                groups = find_groups(model, chunk_bytes=None, batch=batch)
                sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), groups)
                shared_params = share_parameters(sharded) if shared else None
                allocate = shared_params.allocate if shared_params else lambda fresh: None
                materialise_(sharded, device="cpu", seed=0, allocate=allocate)
                # a trial of the loss takes the first error for its own; what was thawed stays so
                for _ in range(1 if name == "ThawsInForward" else 2):
                    with pytest.raises(ColotrainError, match=says):
                        two_steps(model, batch)
                    reshard(sharded)


def test_what_a_forward_may_not_do_is_refused_by_name() -> None:
    run(refuses, 2, [tiny_plan(plugin, 2) for plugin in ("zero1", "zero3")])
