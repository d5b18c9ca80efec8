"""Models that break elsewhere, under every plugin, against one process of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from colotrain.engine.model.model_checks import check_precision
from colotrain.errors import ColotrainError
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from colotrain.verify.compare import CaseResult
from colotrain.verify.reference import run_reference
from colotrain.verify.runner import verify
from colotrain.verify.trajectory import Trajectory
from tests.dist.difficult import MODELS, make
from tests.representatives import chosen, half_of_the_day, representatives
from tests.running import Colotrain

REFERENCES: dict[str, Trajectory] = {}
"""What plain torch made of each case, for all tests of this module: plugins share a case's."""


@pytest.fixture(autouse=True)
def one_reference_for_all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(plan: RunPlan, *, steps: int) -> Trajectory:
        key = f"{steps} {runner._reference_key(plan)}"
        if key not in REFERENCES:
            REFERENCES[key] = run_reference(plan, steps=steps)
        return REFERENCES[key]

    monkeypatch.setattr(runner, "run_reference", reference)


def plan_of(model: str, plugin: str, *overrides: str) -> RunPlan:
    return plan_from(
        [
            "model.target=tests.dist.difficult:make",
            f"model.args.name={model}",
            "data.target=tests.dist.difficult:samples",
            f"plugin={plugin}",
            "train.global_batch=12",
            "train.micro_batch=3",
            "train.max_steps=3",
            "train.seed=7",
            "optim.name=sgd",
            "optim.lr=0.1",
            "optim.schedule.name=constant",
            "cluster.procs_per_node=2",
            "checkpoint.every=0",
            f"name={model}-{plugin}",
            *overrides,
        ]
    )


def check(plans: Sequence[RunPlan], folder: Path) -> list[CaseResult]:
    results = list(verify(plans, folder))
    assert len(results) == len(plans)
    wrong = [
        f"{plan.name}: {result.difference}"
        for plan, result in zip(plans, results, strict=True)
        if not result.passed
    ]
    assert not wrong, "\n".join(wrong)
    return results


TOKENS = ("data.target=tests.dist.difficult:token_samples",)
FINE = ("train.micro_batch=1",)
SETTINGS = {"MeanOfTargets": TOKENS, "OwnInit": ("model.deferred_init=true",)}
AS_THEY_ARE = [(model, SETTINGS.get(model, ())) for model in MODELS]
VARIANTS = [
    *AS_THEY_ARE,
    ("MeanOfTargets", (*TOKENS, *FINE)),  # micro-batches without a single target
    ("Switching", ("train.eval_every=1",)),
    ("Buffers", ("train.eval_every=1", *FINE)),
    ("Stack", ("train.activation_checkpointing=full", "freeze.patterns=[layers.0.*]")),
    ("Stack", ("train.activation_checkpointing=selective", "freeze.patterns=[layers.0.*]")),
    ("Tied", ("train.activation_checkpointing=selective",)),
    ("NestedRouter", ("train.activation_checkpointing=selective", *FINE)),
    ("Stack", ("freeze.patterns=[layers.*]", "freeze.except=[layers.1.linear.bias]")),
    ("Stack", ("freeze.patterns=[layers.*]", "freeze.unfreeze={1:[layers.0.*],2:[layers.2.*]}")),
    ("Tied", ("freeze.patterns=[mixer.weight]",)),
    ("Tied", ("optim.rules=[{match: mixer.*, lr_scale: 0.5}]",)),  # another name of a block's
    ("Sequences", ("train.activation_checkpointing=full",)),
    ("CalledTwice", FINE),
    ("RootParameters", ("freeze.patterns=[scale]", "freeze.unfreeze={1:[scale]}")),
    ("Router", (*FINE, "train.grad_clip=0.05")),
    ("OwnFreeze", ("freeze.except=[head.bias]",)),
]


@pytest.mark.parametrize("plugin", representatives(ROWS, kept=["zero3"]))
def test_difficult_models_train_as_in_one_process(plugin: str, tmp_path: Path) -> None:
    variants = VARIANTS if plugin == "zero3" else half_of_the_day(VARIANTS, of=plugin)
    check([plan_of(model, plugin, *overrides) for model, overrides in variants], tmp_path)


@pytest.mark.slow
def test_they_do_where_parameters_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.gathering")
    models = half_of_the_day(AS_THEY_ARE)
    check([plan_of(model, "zero3", *overrides) for model, overrides in models], tmp_path)


@pytest.mark.parametrize("plugin", ["zero1", "zero3"])
def test_an_error_of_a_tenth_is_found_beside_blocks_in_half_precision(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.scales_a_gradient")
    [result] = verify([plan_of("HalfBlocks", plugin)], tmp_path)
    assert "gradient of head.weight in step 1" in (result.difference or "")


def check_in_half_precision(
    models: Sequence[str], plugin: str, precision: str, folder: Path
) -> None:
    """The models where every group is gathered, against plain torch in the same precision."""
    plans = [
        plan_of(model, plugin, *overrides, f"train.precision={precision}")
        for model, overrides in AS_THEY_ARE
        if model in models
    ]
    assert len(plans) == len(models)
    check(plans, folder)


@pytest.mark.parametrize(("plugin", "precision"), [("zero3", "bf16"), ("gemini", "fp16")])
def test_some_do_where_parameters_are_gathered_in_half_precision(
    plugin: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.gathering")
    models = ("Tied", "FrozenStatistics", "MixedDtypes", "InPlace")
    check_in_half_precision(models, plugin, precision, tmp_path)


def test_complex_parameters_are_refused_in_half_precision() -> None:
    model = make("Complex")
    with pytest.raises(ColotrainError, match=r"fp32 \(phase has complex numbers\)"):
        check_precision(model, "bf16")
    check_precision(model, "fp32")


PAIRS = [(plugin, precision) for plugin in ROWS for precision in ("bf16", "fp16")]
TRIED = [("zero1", "fp16"), ("zero2", "bf16"), ("zero3", "fp16"), ("fsdp-hybrid", "bf16")]
TRIED += [("gemini", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "precision"), chosen(PAIRS, among=TRIED))
def test_all_do_where_parameters_are_gathered_in_half_precision(
    plugin: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.gathering")
    models = [model for model in MODELS if model != "Complex"]  # refused
    models = half_of_the_day(models, of=f"{plugin} {precision}")
    check_in_half_precision(models, plugin, precision, tmp_path)


def test_gradients_of_two_dtypes_in_one_group_are_refused_in_one_line(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "mixed.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).double()\n"
        "    def forward(self, x): return self.b(self.a(x).double()).square().mean()\n"
        "def data(): return [{'x': torch.ones(2) * i} for i in range(64)]\n"
    )
    result = colotrain(
        "run", "model.target=mixed:Model", "data.target=mixed:data", "train.global_batch=4"
    )
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("error: model.target=mixed:Model: expected one")
