"""Cases that were drawn over all settings and seen to be equal to one process still are.

What is drawn anew is for `scripts/random_cases.py` at night: a case that nobody has run yet says
nothing of the change that is tested.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from colotrain.errors import ColotrainError
from colotrain.spec.objectives import OBJECTIVES
from colotrain.spec.optimizers import OPTIMIZERS
from colotrain.spec.plugins import ROWS
from tests.pages import ROOT

pytest.importorskip("transformers")
KEPT = "tests/dist/random_cases.jsonl"
FAST, GROUP, NUM = 4, 8, len((ROOT / KEPT).read_text("utf-8").splitlines())
"""Cases of the fast test, of each slow one, and of all."""
FOUND: tuple[dict[str, Any], ...] = (
    {"model": "llm", "plugin.name": "gemini", "optim.name": "muon", "accumulate.steps": 2},
    {
        **{"model": "llama", "plugin.name": "zero1", "train.objective": "embed"},
        **{"optim.name": "adafactor", "accumulate.steps": 3},
    },
    {
        **{"model": "bert", "plugin.name": "zero3", "train.objective": "masked"},
        **{"model.args.dtype": "bfloat16", "accumulate.steps": 4, "train.grad_clip": 0.1},
        "optim.schedule.warmup_steps": 1,
    },
    {
        **{"model": "tied", "plugin.name": "fsdp-hybrid", "train.objective": "reward"},
        **{"train.activation_checkpointing": "selective", "train.micro_batch": 2},
    },
)
"""Cases that were faults once: Muon's rounding, Adafactor's in float64, a last place of bfloat16,
and attention's keys of a forward that the recomputed one got as well."""
SCRIPTS = ("random_cases", "random_cases_drawing")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("random_cases")
    sys.path.remove(str(ROOT / "scripts"))
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def cases(script: ModuleType) -> Iterator[Any]:
    with script.opened(KEPT) as opened:
        yield opened


def compare(script: ModuleType, cases: Any, numbers: range) -> None:
    outcomes = list(script.run(cases, numbers))
    print(script.report(outcomes))
    assert sorted(o.number for o in outcomes) == list(numbers)
    wrong = [
        f"{script.repeated(cases.seed, o.number)}: {o.text}"
        for o in outcomes
        if o.kind not in (script.EQUAL, script.REFUSED)
    ]
    assert not wrong, "\n".join(wrong)


def test_some_kept_cases(script: ModuleType, cases: Any) -> None:
    compare(script, cases, range(FAST))


def test_cases_that_were_faults_are_equal(script: ModuleType, cases: Any) -> None:
    found = list(cases.outcomes({n: {**c, "replicas": 1} for n, c in enumerate(FOUND)}))
    assert [(o.kind, o.text) for o in found] == [(script.EQUAL, "")] * len(FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, NUM, GROUP))
def test_kept_cases(script: ModuleType, cases: Any, first: int) -> None:
    compare(script, cases, range(first, min(first + GROUP, NUM)))


def test_every_plugin_objective_optimizer_and_axis_is_drawn(script: ModuleType, cases: Any) -> None:
    def draw(number: int) -> dict[str, Any]:
        settings: dict[str, Any] = script.Drawing("0", number, cases.names).case()
        return settings

    drawn = [draw(number) for number in range(500)]

    def values(key: str) -> set[Any]:
        return {settings.get(key) for settings in drawn}

    assert values("plugin.name") == {*ROWS}
    assert values("train.objective") == {None, *OBJECTIVES}
    assert values("optim.name") >= {*OPTIMIZERS} - {"adamw"}
    for axis in importlib.import_module("random_cases_drawing").axes():
        assert values(f"mesh.{axis}") == {None, 2, 4}
    assert drawn[:20] == [draw(number) for number in range(20)]
    with_experts = [d for d in drawn if "mesh.ep" in d and d.get("train.objective") != "masked"]
    assert {d["model"] for d in with_experts} == {"mixture"}


def test_equal_cases_are_kept_in_a_file(script: ModuleType, tmp_path: Any) -> None:
    settings = {"model": "llm", "freeze.unfreeze": {1: ["*up.weight"]}}
    outcomes = [
        script.Outcome(number=n, settings={**settings, "train.micro_batch": n}, kind=kind)
        for n, kind in enumerate((script.EQUAL, script.FAULT, script.REFUSED, script.EQUAL))
    ]
    for outcome in outcomes:
        script.keep(tmp_path / "kept.jsonl", [outcome])
    kept = script.kept_cases(tmp_path / "kept.jsonl")
    assert [case["train.micro_batch"] for case in kept] == [0, 3]
    arguments = [script.arguments_of({**case, "replicas": 1}, "kept") for case in kept]
    assert 'freeze.unfreeze={1: ["*up.weight"]}' in arguments[0]


def test_a_fault_is_told_with_the_command_that_repeats_it(
    script: ModuleType, cases: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A difference, a failure of one of two cases of a launch, a traceback, another plan."""
    simple = {"model": "llm", "plugin.name": "zero2", "replicas": 1}
    monkeypatch.setattr(cases, "settings_of", lambda number: simple | {"train.micro_batch": number})

    def verify(plans: list[Any], folder: Any) -> list[Any]:
        if len(plans) > 1:
            raise ColotrainError("one of them")
        size = plans[0].batch.micro_batch
        if size == 3:
            raise ColotrainError("workers ended early")
        found = SimpleNamespace(passed=size != 2, difference="loss", not_exact="", zero_gradients=0)
        return [found]

    monkeypatch.setattr(script, "verify", verify)
    outcomes = {o.number: o for o in script.run(cases, [1, 2, 3])}
    assert [outcomes[n].kind for n in (1, 2, 3)] == [script.EQUAL, script.FAULT, script.FAULT]
    assert "workers ended early" in outcomes[3].text
    printed = capsys.readouterr().out
    assert f"{cases.seed} --only 2:" in printed
    assert f"{cases.seed} --only 3:" in printed
    plan = script.resolve_config(script.arguments_of(simple, "changed")).plan
    assert list(script.changed(simple, plan)) == []
    assert list(script.changed({"train.micro_batch": 2}, plan)) == []
    assert list(script.changed({"plugin.name": "zero3"}, plan)) == ["plugin.name=zero2, not zero3"]
    monkeypatch.setattr(script, "resolve_config", lambda arguments: 1 / 0)
    assert "ZeroDivisionError" in next(script.run(cases, [1])).text


def test_a_case_against_a_row_has_to_be_refused(
    script: ModuleType, cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    against = {"model": "llm", "plugin.name": "zero2", "replicas": 1, "train.objective": "reward"}
    against |= {"data.packing": "stream"}
    (refused,) = cases.outcomes({0: against})
    assert refused.kind == script.REFUSED
    assert any("data.packing" in row for row in refused.rows)
    monkeypatch.setattr(script, "prepare_all", lambda _: None)
    with_plan = SimpleNamespace(plan=SimpleNamespace(data=None))
    monkeypatch.setattr(script, "resolve_config", lambda _: with_plan)
    (accepted,) = cases.outcomes({0: against})
    assert accepted.kind == script.FAULT
    assert accepted.text.startswith("not refused")
