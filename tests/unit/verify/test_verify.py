"""What `verify` does to a model and says of it, without workers."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from colotrain.cli.main import guarded
from colotrain.errors import ColotrainError
from colotrain.launch.startup import AskedToStop, ended_by_signals
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration
from colotrain.verify import runner
from colotrain.verify.compare import CaseResult, Tolerance, compare
from colotrain.verify.masks import MaskedSamples, without_dropout
from colotrain.verify.reference import _mixing, along, run_reference, serve_signals_
from tests.running import SMALL


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) + functional.alpha_dropout(x, p=0.5, training=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.inner(x, x, x, need_weights=True)[0]
        return whole + self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "build",
    [
        Functional,
        Attention,
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5),
        lambda: nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5)),
    ],
)
def test_no_dropout_of_torch_draws(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.randn(3, 2, 8)
    before, functions = torch.get_rng_state(), dict(vars(functional))
    with without_dropout(model):
        model(x)
    assert torch.equal(before, torch.get_rng_state())
    assert dict(vars(functional)) == functions


def test_a_model_that_draws_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from colotrain.models import llm

    plan = plan_from(list(SMALL))
    assert not run_reference(plan, steps=1).draws
    forward = llm.Block.forward

    def noisy(self: nn.Module, x: Tensor, *args: object) -> Tensor:
        return forward(self, x + torch.rand_like(x), *args)

    monkeypatch.setattr(llm.Block, "forward", noisy)
    wanted, found = run_reference(plan, steps=1), run_reference(plan, steps=1)
    found.losses[0] += 1.0
    result: CaseResult = compare(plan, wanted, found, Tolerance())
    assert (result.draws, result.passed) == (True, False)
    assert "the model draws random numbers" in (result.difference or "")


def test_the_reference_along_a_case_leaves_the_gradients_of_the_case_as_they_are() -> None:
    """In float64 the case's own tensors were clipped in place, and then differed."""
    plan = plan_from([*SMALL, "train.grad_clip=0.01"])
    found = run_reference(plan, steps=1)
    wide = [{name: grad.double() for name, grad in step.items()} for step in found.gradients]
    before = [{name: grad.clone() for name, grad in step.items()} for step in wide]
    along(plan, found, replace(found, gradients=wide))
    for step, kept in zip(wide, before, strict=True):
        assert all(torch.equal(step[name], kept[name]) for name in kept)


def test_rounding_along_a_case_in_half_precision_is_that_of_half_precision() -> None:
    """The rounding of float32 alone called gradients of one float16 case in a hundred wrong."""
    for precision, least, most in (("fp32", 0.0, 1e-6), ("fp16", 1e-5, 1e-2)):
        plan = plan_from([*SMALL, f"train.precision={precision}"])
        found = run_reference(plan, steps=1)
        (errors,) = along(plan, found, found).rounding["gradients"]
        (gradients,) = found.gradients
        assert errors.keys() == gradients.keys()
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        assert least * largest <= max(errors.values()) <= most * largest, precision


@pytest.mark.parametrize("share", [0.98, 0.0])
def test_a_wrong_gradient_is_no_rounding_of_half_precision(share: float) -> None:
    """Sums over 4,096 tokens in float16 are off by more than 2 %, which a run's are not."""
    many = ["train.precision=fp16", "data.seq_len=64", "train.global_batch=64"]
    plan = plan_from([*SMALL, *many])
    found = run_reference(plan, steps=1)
    wrong = {**found.gradients[0], "embed.weight": share * found.gradients[0]["embed.weight"]}
    case = replace(found, gradients=[wrong])
    told = compare(plan, along(plan, found, case), case).difference
    assert told is not None
    assert "embed.weight" in told
    right = compare(plan, along(plan, found, found), found).difference
    assert right is None


def test_a_difference_names_what_makes_samples_depend_on_one_another() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.sum()
            return x

    for module, name in ((nn.BatchNorm1d(4), "0"), (nn.LayerNorm(4), ""), (Counts(), "0.seen")):
        model = nn.Sequential(module)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(8, 4))
        assert _mixing(model, before) == name
    plan = plan_from(list(SMALL))
    wanted, found = run_reference(plan, steps=1), run_reference(plan, steps=1)
    assert wanted.mixes == ""
    found.losses[0] += 1.0
    difference = compare(plan, replace(wanted, mixes="norm"), found, Tolerance()).difference
    assert (difference or "").startswith("norm makes the samples of a micro-batch depend")


class MeanOfTargets(nn.Module):
    """A model that returns the mean over its targets: NaN where there are none."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(input_ids))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_step_without_targets_changes_nothing_where_the_loss_is_a_mean() -> None:
    target = "model.target=tests.unit.verify.test_verify:MeanOfTargets"
    small = [word for word in SMALL if not word.startswith("model.")]
    words = [
        "data.tokenizer=bytes",
        "train.global_batch=1",
        "train.micro_batch=1",
        "data.shuffle=false",
    ]
    plan = plan_from([*small, target, *words, "optim.name=sgd", "cluster.procs_per_node=1"])
    found = run_reference(plan, steps=2)  # the first sample has no label
    assert found.losses[0] == 0.0 < found.losses[1] < math.inf
    assert all(gradient.eq(0).all() for gradient in found.gradients[0].values())
    assert found.gradients[0].keys() == found.gradients[1].keys()
    assert any(gradient.any() for gradient in found.gradients[1].values())


def test_a_signal_ends_a_backward() -> None:
    model = nn.Linear(2, 2)
    serve_signals_(model)
    loss = model(torch.ones(2)).sum()
    loss.register_hook(lambda _: signal.raise_signal(signal.SIGTERM))
    with ended_by_signals("stopped", "begin it again"), pytest.raises(AskedToStop):
        loss.backward()


def test_a_reference_that_cannot_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["verify", *SMALL, "--steps", "1000000000", "--plugins", "zero1"]) == 3
    assert "error: the reference, one process" in capsys.readouterr().err


def test_a_long_verification_says_beforehand_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunPlan] = []

    def none_run(plans: Sequence[RunPlan], *_: object, **__: object) -> Iterator[CaseResult]:
        asked[:] = plans
        return iter(())

    monkeypatch.setattr(runner, "verify", none_run)
    cases = ["verify", *SMALL, "--plugins", "zero1,zero2", "--accumulation", "1,2"]
    assert guarded([*cases, "--steps", "2"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert guarded([*cases, "--steps", "20000"]) == 0
    seconds = sum(plan.train.max_steps * plan.time.step_s for plan in asked)
    assert (seconds > 60, {plan.train.max_steps for plan in asked}) == (True, {20000})
    assert capsys.readouterr().err.splitlines() == [
        f"note: {len(asked)} cases of 20000 steps: about {short_duration(seconds)}, and the "
        "reference beside them"
    ]


@pytest.mark.parametrize(
    ("error", "left"),
    [(ColotrainError("no reference"), 0), (runner.WorkersFailed("rank 1 died"), 1)],
)
def test_files_are_kept_only_if_workers_failed(
    error: Exception, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(runner, "verify", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert guarded(["verify", *SMALL, "--plugins", "zero1"]) == 1
    assert len(list(tmp_path.glob("colotrain-verify-*"))) == left


def test_floating_labels_are_not_masked() -> None:
    """-100 among the values of a regression is a value, and the mean over them counts it."""
    numbers = MaskedSamples([{"labels": torch.zeros(10)}] * 6)
    classes = MaskedSamples([{"labels": torch.zeros(10, dtype=torch.int64)}] * 6)
    assert all((numbers[index]["labels"] == 0).all() for index in range(6))
    masked = [int((classes[index]["labels"] == -100).sum()) for index in range(6)]
    assert masked == [10, 2, 4, 6, 8, 0]
