"""Parts of `colotrain audit` that need no process: sketches, factors of a loss, verdicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colotrain.audit.checks import check, dropout, scheduler
from colotrain.audit.command import START, environment, hidden_python
from colotrain.audit.evidence import Evidence, RankEvidence
from colotrain.audit.ratios import mean, ratio, unpacked
from colotrain.audit.records import EngineInfo, ObservedProcess, ObservedStep
from colotrain.audit.reference import packed, sketch
from colotrain.audit.sites import Site
from colotrain.audit.verdicts import CHECKS, ok, unchecked, unknown, wrong
from colotrain.audit.window import SUMMED, note_factor, origin_of, product
from colotrain.cli.audit import exit_code_of
from colotrain.rundir import RunDir


def of(*tensors: torch.Tensor) -> dict[str, list[float]]:
    return {str(i): unpacked(packed(sketch(t))) for i, t in enumerate(tensors)}


def test_the_mean_of_sketches_is_the_sketch_of_the_mean() -> None:
    a, b = torch.randn(2, 1000, 7).double()
    factor, left = ratio(mean([of(a), of(b)]), of((a + b) / 2))
    assert (factor, left) == (pytest.approx(1.0, abs=1e-12), pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize("changed", [0, 63, 64, 4321])
def test_one_element_that_differs_is_seen(changed: int) -> None:
    a = torch.randn(5000)
    b = a.clone()
    b[changed] += 1.0
    assert ratio(of(b), of(a))[1] > 1e-3


def test_a_multiple_is_told_by_its_factor() -> None:
    tensors = torch.randn(900), torch.randn(3)
    factor, left = ratio(of(*(0.25 * t for t in tensors)), of(*tensors))
    assert factor == pytest.approx(0.25, rel=1e-6)
    assert left < 1e-6


def test_sketching_draws_nothing_from_the_scripts_generator() -> None:
    before = torch.random.get_rng_state()
    sketch(torch.zeros(777))
    assert torch.equal(before, torch.random.get_rng_state())


def test_factors_of_a_loss_are_read_from_its_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    base = weight.sum()
    half = base / 2
    note_factor(half, base, 2, inverse=True, site=Site("a.py:1"), scale=False)
    scaled = half * torch.tensor(1024.0)
    note_factor(scaled, half, torch.tensor(1024.0), inverse=False, site=Site("b.py:2"), scale=True)
    found = origin_of(scaled).factors
    assert [factor.site.line for factor in found] == ["b.py:2", "a.py:1"]
    assert product(found) == (0.5, 1024.0)


def noted(loss: torch.Tensor, by: float) -> torch.Tensor:
    result = loss / by
    note_factor(result, loss, by, inverse=True, site=Site("a.py:1"), scale=False)
    return result


def summed(values: torch.Tensor) -> torch.Tensor:
    total = values.sum()
    total.grad_fn.metadata[SUMMED] = int(values.detach().count_nonzero()), values.numel()
    return total


def test_a_sum_that_is_divided_by_its_own_number_is_a_mean() -> None:
    values = torch.tensor([1.0, 0.0, 2.0, 3.0], requires_grad=True)
    of_three = origin_of(noted(noted(summed(values * 1), 3), 2))
    assert [f.value() for f in of_three.factors] == [0.5]
    assert of_three.count == ["none", 3, 4, [1 / 3, ["a.py:1", ""], False, "divided"]]
    of_seven = origin_of(noted(summed(values * 1), 7))
    assert ([f.by for f in of_seven.factors], of_seven.count) == ([7], ["summed", 3, 4])


def test_what_all_terms_of_a_loss_are_divided_by_counts() -> None:
    values = torch.tensor([1.0, 0.0, 2.0, 3.0], requires_grad=True)
    one, other = summed(values * 1), summed(values * values)
    found = origin_of(noted(one, 7) + noted(noted(other, 7), 100))
    assert ([f.by for f in found.factors], found.count) == ([7], ["summed", 3, 4])
    found = origin_of(noted(one, 7) + noted(other, 8) + 1.0)
    assert (found.factors, found.count) == ([], ["own", 3, 4])
    found = origin_of(noted(one, 3) + values.square().mean())
    assert (found.factors, found.count) == ([], None)
    many = one
    for _ in range(100):
        many = many + many  # each a term of itself
    assert origin_of(many).factors == []


def test_nothing_observed_is_nothing_told() -> None:
    verdicts = check(Evidence(ranks=[], remarks=[], failures=[]))
    assert [verdict.check for verdict in verdicts] == list(CHECKS)
    assert {verdict.outcome for verdict in verdicts} == {"not checked"}
    assert [exit_code_of(code, verdicts) for code in (0, 9, -2, 130)] == [5, 1, 130, 130]
    assert [exit_code_of(code, verdicts, strict=True) for code in (0, 9, -2)] == [4, 1, 130]


def test_what_is_left_open_has_an_exit_code_of_its_own() -> None:
    may_be_meant, compared = unknown("clipping", "a part of the parameters"), ok("steps", "3 steps")
    found = [wrong("zeroing", "never"), unchecked("gradient", "two optimizers")]
    assert [exit_code_of(0, [may_be_meant, compared], strict=s) for s in (False, True)] == [5, 4]
    assert exit_code_of(0, [compared], strict=True) == 0
    assert [exit_code_of(0, found), exit_code_of(0, found[:1])] == [4, 4]


@pytest.mark.parametrize(
    ("words", "option"),
    [(["python", "-I", "a.py"], "-I"), (["python3.11", "-m", "a"], ""), (["torchrun", "-E"], "")],
)
def test_a_python_that_ignores_the_observation_is_refused(words: list[str], option: str) -> None:
    assert hidden_python(words) == option


def test_a_sitecustomize_that_is_hidden_runs_and_nothing_is_printed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = 7\n")
    env = environment(RunDir(tmp_path / "run"), steps=0)
    env["PYTHONPATH"] += f":{tmp_path}"
    code = f"import sys\nassert own == 7\nassert {str(START)!r} not in sys.path\nprint('x')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")


def observed(step: int, micro_batches: int) -> ObservedStep:
    return ObservedStep(
        step=step,
        optimizer=0,
        optimizer_name="SGD",
        site=["train.py:9", ""],
        micro_batches=micro_batches,
        backwards=micro_batches,
        backward_at=["train.py:7", ""],
        again_at=["", ""],
        step_calls=1,
        closure_calls=0,
        zero_calls=0,
        lost=0,
        lost_at=["", ""],
        clips=[],
        scheduler_steps=0,
        scheduler_at=["", ""],
        scale=False,
        losses=[],
        rebuilt=False,
        off=[],
        off_at=["", ""],
    )


@pytest.mark.parametrize(("micro_batches", "outcome"), [(4, "ok"), (12, "wrong")])
def test_a_step_of_other_micro_batches_than_the_engines_is_wrong(
    micro_batches: int, outcome: str
) -> None:
    process = ObservedProcess(
        rank=0, world_size=1, pid=1, torch="", model="Net", framework="DeepSpeedEngine"
    )
    own = RankEvidence(
        process=process,
        steps=[observed(step, micro_batches) for step in (1, 2)],
        engine=EngineInfo(name="deepspeed", accumulation_steps=4, stage=1),
    )
    (found, *_) = check(Evidence(ranks=[own], remarks=[], failures=[]))
    assert (found.check, found.outcome) == ("steps", outcome), found


@pytest.mark.parametrize(("ranks", "outcome"), [(1, "wrong"), (2, "ok")])
def test_accelerate_makes_a_scheduler_step_per_process_and_not_more(
    ranks: int, outcome: str
) -> None:
    site = ["train.py:9", "accelerate/scheduler.py:82"]
    steps = [
        SimpleNamespace(step=n, scheduler_steps=2 * (n > 1), scheduler_at=site, skips=0)
        for n in (1, 2, 3)
    ]
    first = SimpleNamespace(steps=steps, num_optimizers=1)
    evidence = SimpleNamespace(first=first, world_size=ranks)
    assert scheduler(cast(Any, evidence)).outcome == outcome


@pytest.mark.parametrize(
    ("library", "outcome"),
    [("", "wrong"), ("mine/loop.py:3", "wrong"), ("accelerate/accelerator.py:3", "ok")],
)
def test_equal_dropout_masks_may_be_meant_where_a_library_seeds_ranks_alike(
    library: str, outcome: str
) -> None:
    rank = SimpleNamespace(dropout=True, random=["a", "b"])
    step = SimpleNamespace(backward_at=["train.py:7", library])
    other = SimpleNamespace(dropout=True, random=["c", "d"])
    ranks = {"num_losses": 2, "losses_of": [[0], [1]]}
    alike = SimpleNamespace(step=step, details=[rank, rank], **ranks)
    different = SimpleNamespace(step=step, details=[rank, other], **ranks)
    assert dropout(cast(Any, [alike])).outcome == outcome
    assert dropout(cast(Any, [different])).outcome == "ok"
