"""`colotrain verify` passes when the promise holds, and names what is broken when it does not."""

from __future__ import annotations

import json

import pytest

from colotrain.cli.main import guarded
from colotrain.models import loading
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist.mutants.builds_wrong import built_wrong
from tests.representatives import representatives
from tests.running import SMALL, Colotrain

KEYS = {
    "plugin",
    "world_size",
    "accumulation_steps",
    "freeze",
    "max_abs_loss",
    "max_abs_gradient",
    "max_abs_parameter",
    "optimizer_steps",
    "expected_optimizer_steps",
    "frozen_unchanged",
    "passed",
}


def check_every_plugin(world_sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = guarded(["verify", *SMALL, "--world-sizes", world_sizes, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["passed"]
    assert document["reference"] == "single process"
    cases = document["cases"]
    sizes = [int(size) for size in world_sizes.split(",")]
    assert len(cases) == len(sizes) * 5 * 2 * 3  # world sizes, plugins, accumulation, freeze sets
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert {case["world_size"] for case in cases} == set(sizes)
    for case in cases:
        assert set(case) >= KEYS
        assert case["optimizer_steps"] == case["expected_optimizer_steps"] == 3
        assert case["frozen_unchanged"]
        assert case["max_abs_gradient"] <= 1e-6
        assert case["max_abs_parameter"] <= 1e-6


def test_every_plugin_equals_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """On three ranks, over which rows do not divide."""
    check_every_plugin("3", capsys)


@pytest.mark.slow
def test_every_plugin_does_on_several_numbers_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    check_every_plugin("2,3", capsys)


@pytest.mark.parametrize("plugin", representatives(["zero1", "zero3"], kept=["zero3"]))
@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        ("skips_a_reduction", "gradient of"),
        ("steps_every_micro_batch", "after step 1"),
        ("weighs_micro_batches_equally", "loss of step 1"),
        ("unfreezes_one_tensor", "blocks.1.mlp.down.weight"),
        ("drops_the_last_micro_batch", "loss of step 1"),
        ("clips_by_a_rank", "parameter"),
        ("begins_otherwise", "initial value of head.weight"),
    ],
)
def test_a_broken_contract_is_found_and_named(
    mutant: str,
    says: str,
    plugin: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    code = guarded(
        [
            "verify",
            *SMALL,
            "freeze.patterns=[embed*,blocks.1.mlp.*]",
            "train.grad_clip=0.3",
            "--plugins",
            plugin,
            "--accumulation",
            "4",
            "--steps",
            "2",
        ]
    )
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert code == 4
    assert f"{plugin} on 2 ranks" in error
    assert says in error


def test_a_model_that_is_built_wrong_everywhere_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference shares no code with what builds the model for training."""
    monkeypatch.setattr(loading, "_with_values", built_wrong)
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.builds_wrong")
    arguments = ["model.target=tests.dist.random_constructors:make", "+model.args.seed=2"]
    arguments += ["data.target=tests.dist.random_constructors:samples", "train.global_batch=4"]
    code = guarded(["verify", *arguments, "--plugins", "zero2", "--steps", "1"])
    assert code == 4
    assert "initial value of" in capsys.readouterr().err


def test_adamw_may_differ_by_what_rounding_explains_and_no_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["verify", *SMALL, "data.seq_len=64", "freeze.patterns=[embed*]", "--json"]
    arguments += ["--plugins", "zero2", "--accumulation", "2", "--optimizer", "recipe"]
    code = guarded(arguments)
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert code == 0, cases
    assert max(case["max_abs_parameter"] for case in cases) > 1e-6  # AdamW's part in it
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.forgets_its_moments")
    assert guarded(arguments) == 4
    assert "after step 2: differs by" in capsys.readouterr().err


@pytest.mark.parametrize("accumulation", ["2", "4"])
def test_a_step_of_rounding_is_no_difference(
    accumulation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step is compared from the case's own parameters where the trajectories part."""
    arguments = [
        "recipe=llm-tiny",
        "data.seq_len=32",
        "--plugins",
        "zero2",
        "--optimizer",
        "recipe",
    ]
    arguments += ["--accumulation", accumulation, "--freeze", "none", "--steps", "4"]
    code = guarded(["verify", *arguments, "--world-sizes", "1,2", "--json"])
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert code == 0, cases
    assert max(case["max_abs_parameter"] for case in cases) > 1e-6


def test_a_resume_is_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["verify", *SMALL, "--plugins", "zero2,gemini", "--freeze", "none", "--resume"]
    arguments += ["--accumulation", "2", "--optimizer", "recipe", "--steps", "4"]
    assert guarded(arguments) == 0
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.forgets_on_resume")
    assert guarded(arguments) == 4
    assert "after step 4: differs by" in capsys.readouterr().err
    assert guarded(["verify", *SMALL, "--resume", "--steps", "1"]) == 2
    assert "--steps=1: expected 2 with --resume" in capsys.readouterr().err


def test_the_last_evaluation_is_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "tests.dist.with_metrics"
    arguments = ["verify", f"model.target={own}:Model", f"data.target={own}:Samples"]
    arguments += ["data.validation_fraction=0.25", "train.micro_batch=2", "--world-sizes", "2"]
    arguments += ["--plugins", "zero1,zero3", "--freeze", "none", "--accumulation", "2"]
    assert guarded([*arguments, f"train.metrics={own}:means"]) == 0
    assert guarded([*arguments, f"train.metrics={own}:largest"]) == 4
    said = capsys.readouterr().err
    assert "largest of the evaluation" in said
    assert "a metric that is no mean over samples" in said
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.evaluates_one_rank")
    assert guarded(arguments) == 4
    assert "validation_loss of the evaluation" in capsys.readouterr().err


def test_progress_is_told_case_by_case(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--plugins", "zero1", "--world-sizes", "1", "--accumulation", "1", "--steps", "1")
    assert guarded(["verify", *SMALL, *few, "--json"]) == 0
    printed = capsys.readouterr()
    total = len(json.loads(printed.out)["cases"])
    lines = [line for line in printed.err.splitlines() if line.startswith("preparing=")]
    assert f"preparing=training done=0 total={total}" in lines
    assert f"preparing=training done={total} total={total}" in lines
    assert f"preparing=reference done=0 total={total}" in lines


def test_bad_options_are_one_line_each(colotrain: Colotrain) -> None:
    result = colotrain("verify", *SMALL, "--plugins", "zero4", "--world-sizes", "2")
    assert result.code == 2
    assert result.err.splitlines() == [
        "error: --plugins=zero4: expected a plugin; did you mean zero3 or zero2 or zero1?"
    ]


WEAK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        self.look()
        return {"loss": ((self.out(self.hidden(x).tanh()) - y) ** 2).mean()}

    def look(self):
        pass


class Asserts(Net):
    def look(self):
        assert self.out.weight.dtype == torch.float32, "float32 alone"


class BeginsWithZeros(Net):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)


class Toggles(Net):
    def look(self):
        if not self.hidden.weight.requires_grad:
            raise KeyError("frozen by somebody else")


def samples():
    drawn = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=drawn), "y": torch.ones(1)} for _ in range(64)]
"""


def test_what_weakens_a_comparison_or_ends_it_is_told(colotrain: Colotrain) -> None:
    (colotrain.cwd / "weak.py").write_text(WEAK)
    words = ("data.target=weak:samples", "train.micro_batch=4", "train.max_steps=1", "optim.lr=0.1")
    words += ("cluster.procs_per_node=2", "--plugins", "zero2", "--accumulation", "4")
    words += ("--steps", "1")
    exact = colotrain("verify", "model.target=weak:Net", *words, "--freeze", "none")
    assert exact.code == 0
    assert "note:" not in exact.err
    asserts = colotrain("verify", "model.target=weak:Asserts", *words, "--freeze", "none")
    assert asserts.code == 0
    assert "in float64 the model fails (AssertionError: float32 alone (weak.py:" in asserts.err
    zeros = colotrain("verify", "model.target=weak:BeginsWithZeros", *words, "--json")
    assert zeros.code == 0
    assert "note: 2 parameters had gradients of zeros alone" in zeros.err
    assert [case["zero_gradients"] for case in zeros.json["cases"]] == [2, 1, 1]
    toggles = colotrain("verify", "model.target=weak:Toggles", *words)
    assert toggles.code == 1
    assert "(zero2, accumulation 4, frozen by 1 pattern): rank" in toggles.err
    assert "--freeze none leaves out what verify itself freezes" in toggles.err
    assert colotrain("verify", "model.target=weak:Toggles", *words, "--freeze", "none").code == 0
