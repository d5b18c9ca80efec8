"""What this machine does per second: fitted from timed steps, kept, and used by plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colotrain.cli import measure
from colotrain.cli.plan import describe
from colotrain.errors import ColotrainError
from colotrain.planner import rates
from colotrain.planner.rates import Measurement
from colotrain.planner.traced.measuring import LEAST, fit
from colotrain.runs.resolving import resolve_config
from tests.running import SMALL, Colotrain

GUESS = {"a": 1e-9, "b": 1e-6, "c": 1e-3}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def cases(costs: dict[str, float]) -> tuple[list[dict[str, float]], list[float]]:
    amounts = [
        {"a": 1e9, "b": 1e3, "c": 2.0},
        {"a": 1e7, "b": 5e5, "c": 4.0},
        {"a": 3e6, "b": 2e3, "c": 90.0},
        {"a": 4e8, "b": 3e5, "c": 30.0},
    ]
    return amounts, [sum(costs[n] * a for n, a in case.items()) for case in amounts]


def test_costs_are_found_again_in_the_times_that_they_make() -> None:
    true = {"a": 2.5e-9, "b": 0.4e-6, "c": 1.7e-3}
    amounts, seconds = cases(true)
    found = fit(amounts, seconds, GUESS)
    assert found == pytest.approx(true, rel=0.02)


def test_what_no_case_tells_stays_as_it_was_guessed() -> None:
    amounts, _ = cases(GUESS)
    little = [{**case, "a": 0.0, "d": 1e-12} for case in amounts]
    found = fit(little, [1.0] * 4, GUESS | {"d": 7.0})
    assert found["d"] == pytest.approx(7.0, rel=0.01)
    assert "a" not in found


def test_no_cost_is_negative_whatever_the_times_are() -> None:
    amounts, seconds = cases(GUESS)
    seconds[0] /= 50  # less than its operations could take
    found = fit(amounts, seconds, GUESS)
    assert all(found[name] >= LEAST * GUESS[name] * 0.999 for name in GUESS)


def measured(seconds: float) -> Measurement:
    """A machine on which a step takes `seconds`, and all else nothing."""
    guess = rates.guess(threads=1, precision="fp32")
    costs = dict.fromkeys(guess, 0.0) | {"step_s": seconds}
    return Measurement(costs=rates.Costs(**costs), peak_flops=1e11, errors=(0.01,))


def test_a_measurement_is_kept_for_its_ranks_and_precision_and_nothing_else() -> None:
    rates.remember(measured(0.5), cores=2, ranks=2, precision="fp32")
    assert rates.known(cores=2, ranks=2, precision="fp32") == measured(0.5)
    assert rates.known(cores=2, ranks=4, precision="fp32") is None
    assert rates.known(cores=8, ranks=2, precision="fp32") is None
    assert rates.known(cores=2, ranks=2, precision="bf16") is None


def test_a_torn_measurement_counts_as_none(tmp_path: Path) -> None:
    rates.remember(measured(0.5), cores=2, ranks=2, precision="fp32")
    (file,) = (tmp_path / "cache" / "rates").iterdir()
    file.write_text(file.read_text("utf-8")[:40], "utf-8")
    assert rates.known(cores=2, ranks=2, precision="fp32") is None


def test_a_plan_takes_its_times_from_the_measurement_and_says_when_there_is_none() -> None:
    resolved = resolve_config([*SMALL, "plugin=zero2"], here=False)
    assert any("--measure" in text for text in describe(resolved)["warnings"])
    cores = resolved.context.machine.cores_used(2)
    rates.remember(measured(0.125), cores=cores, ranks=2, precision="fp32")
    resolved = resolve_config([*SMALL, "plugin=zero2"], here=False)
    document = describe(resolved)
    assert document["time"]["step_s"] == pytest.approx(0.125)
    assert document["warnings"] == []


def test_measuring_is_refused_where_published_figures_count(tmp_path: Path) -> None:
    words = ("recipe=llm-1b", "hardware=a100-80g", "cluster.procs_per_node=8", "--measure")
    result = Colotrain(tmp_path)("plan", *words)
    assert result.code == 2
    assert "only CPUs are measured" in result.err


@pytest.mark.slow
def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    command = Colotrain(tmp_path)
    result = command("plan", *SMALL, "plugin=zero2", "--measure", "--json")
    assert result.code == 0, result.err
    assert not any("--measure" in text for text in result.json["warnings"])
    (file,) = (tmp_path / "cache" / "rates").iterdir()
    found = json.loads(file.read_text("utf-8"))
    assert len(found["errors"]) == len(rates.SHAPES)
    assert all(value > 0 for name, value in found["costs"].items() if "byte_s" not in name)


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(measure, "new_python", lambda: [str(program)])
    monkeypatch.setattr(measure, "LIMIT_S", 1.0)
    with pytest.raises(ColotrainError, match="--measure: a rank ended without an answer"):
        measure._run(tmp_path / "task.json", 2)
