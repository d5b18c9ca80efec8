"""Other people's idioms: each trains right, is refused, or says what it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colotrain.runs.resolving import plan_from
from colotrain.verify.compare import Tolerance
from colotrain.verify.runner import verify
from tests.running import Colotrain, losses

OF_TOKENS = (
    "model.target=tests.dist.idioms:HalfLoss",
    "data.target=tests.dist.idioms:tokens",
    "train.global_batch=16",
    "train.micro_batch=4",
    "train.max_steps=3",
    "train.eval_steps=0",
    "optim.name=sgd",
    "optim.lr=0.1",
    "optim.schedule.name=constant",
    "cluster.procs_per_node=2",
)


@pytest.fixture
def here(colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch) -> Colotrain:
    """A command line that finds these tests' modules."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    return colotrain


def test_a_half_precision_mean_loss_is_weighted_in_float32(here: Colotrain) -> None:
    full = here.run(*OF_TOKENS)
    half = here.run(*OF_TOKENS, "train.precision=fp16", "name=half")
    steps = [e.fields["skipped"] for e in here.events("half") if e.kind == "step" and e.rank == 0]
    assert steps == [False] * 3
    assert losses(half) == pytest.approx(losses(full), rel=2e-3)


STATEFUL = (
    *OF_TOKENS,
    "model.target=tests.dist.idioms:Countdown",
    "optim.name=tests.dist.idioms:OwnSteps",
    "train.max_steps=5",
)


def test_plain_data_of_modules_and_optimizers_is_saved(here: Colotrain) -> None:
    straight = here.run(*STATEFUL, "name=straight")
    here.run(*STATEFUL, "name=cut", "train.max_steps=2")
    resumed = here("resume", "cut", "train.max_steps=5", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == losses(straight)


def test_what_cannot_be_saved_ends_the_run_after_its_first_update(here: Colotrain) -> None:
    result = here("run", *STATEFUL, "model.target=tests.dist.idioms:Unsaveable", "name=never")
    assert result.code == 1
    assert (
        "what get_extra_state() gives cannot be saved (it['hook'][0] is a builtins." in result.err
    )
    events = here.events("never")
    assert not [e for e in events if e.kind == "step"]
    assert len([e for e in events if e.kind == "started" and e.rank == 0]) == 1


def test_a_run_goes_back_to_an_older_checkpoint_and_saves_what_it_took_from_another(
    here: Colotrain,
) -> None:
    every = ("checkpoint.every=1", "checkpoint.keep=9")
    before = here.run(*OF_TOKENS, *every, "name=first")
    folder = here.rundir("first").checkpoints
    result = here("resume", "first", f"checkpoint.resume={folder / 'step-00000001'}", "--json")
    assert result.code == 0, result.err
    assert f"step-00000002, step-00000003: kept in {folder / 'superseded-1'}" in result.err
    [resumed] = [e for e in here.events("first") if e.kind == "resumed"]
    assert resumed.fields["step"] == 1
    assert losses(result.json) == losses(before)
    assert len(list(folder.glob("superseded-1/step-*"))) == 2
    assert len(list(folder.glob("step-*"))) == 3

    other = (f"checkpoint.resume={folder}/step-00000003", "train.on_nonfinite=rollback")
    here.run(*OF_TOKENS, *every, "name=second", *other)
    assert [p.name for p in here.rundir("second").checkpoints.glob("step-*")] == ["step-00000003"]


def test_targets_are_counted_and_kept_as_the_model_sees_them(tmp_path: Path) -> None:
    """Labels shifted inside, labels whose logit is masked, and targets in half precision."""
    fine = ("train.micro_batch=1",)
    models: dict[str, tuple[str, ...]] = {
        "Shifts": fine,
        "NeverZero": fine,
        "Regression": ("data.target=tests.dist.idioms:numbers", "train.precision=bf16"),
        "Normalised": ("train.precision=fp16",),
        "Large": ("train.precision=fp16",),  # the first loss scale makes it skip steps
    }
    plans = [
        plan_from(
            [*OF_TOKENS, f"model.target=tests.dist.idioms:{model}", *more, "checkpoint.every=0"]
        )
        for model, more in models.items()
    ]
    coarse = Tolerance.explained_by("fp16", [])
    for name, result in zip(models, verify(plans, tmp_path, tolerance=coarse), strict=True):
        assert name == "Regression" or result.passed, f"{name}: {result.difference}"
        if (
            name == "Regression"
        ):  # rounding of activations alone: of the targets' it would be hundreds
            assert result.max_abs_loss < 1.0


@pytest.mark.parametrize("how", ["number", "tensor"])
def test_a_weight_first_used_outside_its_block_in_a_later_step_is_an_error_by_name(
    here: Colotrain, how: str
) -> None:
    late = ("model.target=tests.dist.idioms:Late", f"model.args.how={how}", "plugin=zero3")
    late = (*OF_TOKENS, *late, "train.micro_batch=8")
    here.run(*late)  # from the second forward on: forwards before the first step show it
    result = here("run", *late, "model.args.after=40", "train.max_steps=60")
    assert result.code == 1
    assert "forward uses layers.0.weight outside the block that holds it" in result.err


def test_a_weight_used_outside_its_block_in_evaluation_alone_counts_whole(here: Colotrain) -> None:
    late = ("model.target=tests.dist.idioms:Late", "model.args.how=evaluation")
    found = {}
    for plugin, ranks in (("zero1", 1), ("zero1", 2), ("zero3", 2), ("gemini", 2)):
        name = f"{plugin}-{ranks}"
        plan = (*OF_TOKENS, *late, f"plugin={plugin}", f"cluster.procs_per_node={ranks}")
        here.run(*plan, "train.eval_steps=1", "train.micro_batch=8", f"name={name}")
        found[name] = [e.fields["loss"] for e in here.events(name) if e.kind == "eval"]
    for name, losses_of in found.items():
        assert losses_of, name
        assert losses_of == pytest.approx(found["zero1-1"], rel=1e-6), name


def test_after_an_exception_in_backward_nothing_is_added_to_what_it_left(here: Colotrain) -> None:
    file = here.cwd / "failed"
    once = ("model.target=tests.dist.idioms:FailsOnce", f"model.args.file={file}")
    found = here.run(*OF_TOKENS, *once, "checkpoint.every=1", "name=once")
    assert file.exists()
    assert found["restarts"] == 1
    assert losses(found) == losses(here.run(*OF_TOKENS, *once, "name=straight"))
