"""Optimizers that need more than an element, where ranks divide matrices, or experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from colotrain.errors import ConfigError
from colotrain.planner.traced.optimizer_trial import why_not_on_stages
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS
from colotrain.verify.compare import Tolerance
from colotrain.verify.runner import verify
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_expert_parallel import OF_MATRICES
from tests.dist.test_expert_parallel import OWN as EXPERTS
from tests.dist.test_run import losses
from tests.representatives import of_each_day, representatives

NAMES = ("muon", "adafactor", "torch.optim:NAdam", "tests.dist.own_optimizers:TrustRatio")
STEPS = ("optim.lr=0.02", "optim.schedule.name=constant", "mesh.tp=2")
MATRICES = OF_MATRICES[-1]
EXACT, LOOSE = (
    Tolerance(parameter=1e-5),
    Tolerance(loss=1e-4, gradient=1e-3, parameter=2e-3),
)
"""muon iterates in bfloat16, where a last bit of difference in its input may show."""


@pytest.mark.parametrize("plugin", of_each_day(ROWS, kept=["zero3"]))
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_matrices_are_updated_as_whole_ones(
    name: str, plugin: str, tmp_path: Path
) -> None:
    words = (*SMALL, *STEPS, f"optim.name={name}", f"plugin={plugin}", "train.max_steps=3")
    plan = plan_from([*words, "cluster.procs_per_node=4", "checkpoint.every=0"])
    tolerance = LOOSE if name == "muon" else EXACT
    (result,) = verify([plan], tmp_path, tolerance=tolerance)
    assert result.passed, result.difference


@pytest.mark.parametrize("name", representatives((*NAMES, "adamw8bit"), kept=["muon", "adafactor"]))
def test_parts_of_experts_are_updated_as_whole_ones(name: str, tmp_path: Path) -> None:
    steps = ("optim.lr=0.02", "optim.schedule.name=constant", "train.max_steps=3", "mesh.ep=2")
    more = ("plugin=zero3", "cluster.procs_per_node=4", "checkpoint.every=0")
    plan = plan_from([*EXPERTS, *steps, *more, f"optim.name={name}"])
    (result,) = verify([plan], tmp_path, tolerance=LOOSE if name == "muon" else EXACT)
    assert result.passed, result.difference


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_experts_and_of_matrices_are_updated_as_whole_ones(
    name: str, tmp_path: Path
) -> None:
    """Sums over ranks with parts of one are no sums over those with parts of the other."""
    more = ("plugin=zero3", "cluster.procs_per_node=8", "checkpoint.every=0", "mesh.ep=2")
    words = (*EXPERTS[:-1], MATRICES, *STEPS, *more, "train.max_steps=3", f"optim.name={name}")
    (result,) = verify(
        [plan_from([*words])], tmp_path, tolerance=LOOSE if name == "muon" else EXACT
    )
    assert result.passed, result.difference


@pytest.mark.parametrize("name", representatives(NAMES[:3], kept=["adafactor"]))
def test_a_run_goes_on_with_whole_matrices(name: str, colotrain: Colotrain) -> None:
    """The state of parts is that of the whole: rows, columns and numbers of each element."""
    words = (*SMALL, *STEPS, f"optim.name={name}", "plugin=zero3", "cluster.procs_per_node=4")
    whole = losses(colotrain.run(*words, "name=whole", "train.max_steps=5"))
    for to in ("mesh.tp=2", "mesh.tp=1"):
        half = f"half-{to[-1]}"
        colotrain.run(*words, f"name={half}", "train.max_steps=3")
        found = losses(colotrain.resume(half, "train.max_steps=5", to, "plugin=zero2"))
        within = 1e-3 if name == "muon" else 1e-5
        assert found[3:] == pytest.approx(whole[3:], abs=0.0 if to == "mesh.tp=2" else within)


@pytest.mark.parametrize(
    "axes",
    [
        ("mesh.ep=4",),
        pytest.param(("mesh.ep=2", "mesh.tp=2", MATRICES), marks=pytest.mark.slow),
    ],
)
def test_the_state_of_one_expert_goes_on_with_all(
    axes: tuple[str, ...], colotrain: Colotrain
) -> None:
    """Sums over the experts of a bias [experts, d] are no expert's, where a rank has one."""
    words = (*EXPERTS, "optim.name=adafactor", "optim.lr=0.02", "plugin=zero2")
    words += ("cluster.procs_per_node=4", "train.eval_steps=0", "optim.schedule.name=constant")
    whole = losses(colotrain.run(*words, *axes, "name=whole", "train.max_steps=3"))
    colotrain.run(*words, *axes, "name=half", "train.max_steps=2")
    found = losses(colotrain.resume("half", "train.max_steps=3", "mesh.ep=1", "mesh.tp=1"))
    assert found == pytest.approx(whole, abs=1e-5)


OWN = "tests.dist.own_optimizers:"
ON_STAGES = ("torch.optim:NAdam", f"{OWN}TrustRatio", f"{OWN}TwoRates", "torch.optim:Adamax")


@pytest.mark.parametrize("name", representatives(ON_STAGES, kept=ON_STAGES[:2]))
def test_stages_are_updated_as_one_model(name: str, tmp_path: Path) -> None:
    words = (*SMALL, "optim.lr=0.02", "optim.schedule.name=constant", "train.max_steps=3")
    more = ("mesh.pp=2", "plugin=zero3", "train.grad_clip=0.1", "checkpoint.every=0")
    tied = "model.args.tie_embeddings=true"
    (result,) = verify([plan_from([*words, *more, tied, f"optim.name={name}"])], tmp_path)
    assert result.passed, result.difference


@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, "mesh.tp=2", "cluster.procs_per_node=4"),
        pytest.param((*SMALL, "mesh.tp=2", "cluster.procs_per_node=8"), marks=pytest.mark.slow),
    ],
    ids=["pp, tp", "dp, pp, tp"],
)
def test_parts_of_matrices_are_those_of_a_stage(words: tuple[str, ...], tmp_path: Path) -> None:
    more = ("optim.lr=0.02", "optim.schedule.name=constant", "train.max_steps=2", "plugin=zero3")
    named = ("mesh.pp=2", "checkpoint.every=0", f"optim.name={OWN}TrustRatio")
    (result,) = verify([plan_from([*words, *more, *named])], tmp_path)
    assert result.passed, result.difference


@pytest.mark.slow
def test_a_run_of_stages_goes_on_with_its_own_optimizer(colotrain: Colotrain) -> None:
    words = (*SMALL, *STEPS[:2], "optim.name=torch.optim:NAdam", "plugin=zero3", "mesh.pp=2")
    whole = losses(colotrain.run(*words, "name=whole", "train.max_steps=4"))
    for to in ("mesh.pp=2", "mesh.pp=1"):
        half = f"half-{to[-1]}"
        colotrain.run(*words, f"name={half}", "train.max_steps=2")
        found = losses(colotrain.resume(half, "train.max_steps=4", to))
        assert found == pytest.approx(whole, abs=0.0 if to == "mesh.pp=2" else 1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OneNorm", "it gave values that differ by"),
        ("Noisy", "it gave values that differ by"),
        ("Counting", "it changes 'count' of its parameter groups"),
        ("NeverEmpty", "IndexError"),
    ],
)
def test_what_is_another_optimizer_on_stages_is_refused(name: str, reason: str) -> None:
    freeze = "freeze.patterns=[embed*]"
    with pytest.raises(ConfigError, match=reason) as error:
        plan_from([*SMALL, f"optim.name={OWN}{name}", "mesh.pp=2", freeze])
    assert [problem.key for problem in error.value.problems] == ["optim.name"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "RAdam", "ASGD"])
def test_torch_s_elementwise_optimizers_may_be_divided(name: str) -> None:
    plan = plan_from([*SMALL, f"optim.name=torch.optim:{name}"]).optim
    assert why_not_on_stages(plan, with_none=True) is None
