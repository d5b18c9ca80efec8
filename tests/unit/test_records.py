"""Reading plain data into records: every mistake is found, named and explained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from colotrain import records
from colotrain.config import schema
from colotrain.config.schema import Config
from colotrain.errors import MOST_PROBLEMS, ConfigError, Problem, suggest
from colotrain.records import (
    DEEPEST,
    MISSING,
    after,
    field_types,
    from_json,
    from_plain,
    leaves,
    read,
    sections,
    to_plain,
)
from colotrain.show.formatting import shown, shown_loss
from colotrain.spec.elastic import ElasticPlan
from colotrain.spec.objectives import DistillPlan
from colotrain.spec.observing import Notify, NotifyPlan
from colotrain.spec.plan import (
    CheckpointPlan,
    DataPlan,
    FreezePlan,
    OptimPlan,
    PartPlan,
    TrainPlan,
)
from colotrain.spec.quantities import format_seconds, format_size, short_duration, short_size


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    rate: float = 0.5
    names: tuple[str, ...] = ()
    except_: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    mode: Literal["fast", "slow"] = "fast"
    steps: int | Literal["auto"] = "auto"
    at: dict[int, list[str]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def problems_of(data: Any, cls: type = Outer) -> list[str]:
    problems: list[Problem] = []
    read(cls, data, key="", problems=problems)
    return [str(problem) for problem in problems]


def test_a_record_survives_the_way_to_plain_data_and_back() -> None:
    record = Outer(name="a", at={3: ["x"]}, inner=Inner(names=("p", "q"), except_=["r"]))
    plain = to_plain(record)
    assert plain["inner"]["except"] == ["r"]
    assert plain["at"] == {"3": ["x"]}
    assert from_plain(Outer, plain) == record


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"name": "a", "mode": "fas"}, "mode=fas: expected one of fast, slow; did you mean fast?"),
        ({"name": "a", "steps": "abc"}, "steps=abc: expected an integer or auto"),
        ({"name": "a", "steps": 1.5}, "steps=1.5: expected an integer or auto"),
        ({"name": "a", "steps": True}, "steps=true: expected an integer or auto"),
        ({"name": "a", "inner": {"size": "x"}}, "inner.size=x: expected an integer"),
        ({"name": "a", "inner": {"size": None}}, "inner.size=null: expected an integer"),
        ({"name": "a", "inner": {"rate": 10**400}}, "expected a number"),
        ({"name": "a", "inner": {"names": "x"}}, "expected a list; write inner.names=[x]"),
        ({"name": "a", "inner": {"names": [None]}}, "inner.names[0]=null: expected text"),
        ({"name": "a", "inner": 3}, "inner=3: expected the keys size, rate, names, except"),
        (
            {"name": "a", "inner": {"siz": 3}},
            "inner.siz=3: expected a known key; did you mean inner.size?",
        ),
        ({"name": "a", "size": 3}, "size=3: expected a known key; did you mean inner.size?"),
        ({"name": "a", "at": {"x": []}}, "expected an integer before each `:`"),
        ({"name": "a", "at": [1]}, "expected a mapping"),
        ({"name": MISSING}, "name: expected a value; set name=VALUE"),
        ({}, "name: expected a value; set name"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_expectation_and_fix(data: Any, line: str) -> None:
    found = problems_of(data)
    assert len(found) == 1, found
    assert line in found[0]
    assert "; " in found[0], "no fix is named"
    assert "\n" not in found[0]


def test_all_mistakes_are_reported_together() -> None:
    data = {"mode": 1, "steps": "x", "inner": {"size": "x", "nope": 1}, "at": {"y": 3}}
    assert len(problems_of(data)) == 7


def test_a_field_with_a_mistake_keeps_its_default_and_its_neighbours_their_values() -> None:
    problems: list[Problem] = []
    data = {"name": "a", "inner": {"size": "x", "rate": 2}}
    record = read(Outer, data, key="", problems=problems)
    assert problems
    assert record.inner == Inner(size=3, rate=2.0)


def test_numbers_are_taken_as_text_and_whole_floats_as_integers() -> None:
    record = from_plain(Outer, {"name": 7, "inner": {"size": 4.0, "rate": 1}})
    assert (record.name, record.inner.size, record.inner.rate) == ("7", 4, 1.0)


def test_keys_of_a_mapping_may_be_written_as_text() -> None:
    assert from_plain(Outer, {"name": "a", "at": {"5": ["x"]}}).at == {5: ["x"]}


def test_a_wrong_record_raises_one_error_with_every_problem() -> None:
    with pytest.raises(ConfigError) as error:
        from_plain(Outer, {"mode": "x", "steps": "y"})
    assert len(error.value.problems) == 3
    assert len(error.value.lines()) == 3
    assert error.value.exit_code == 2


def test_a_long_value_is_shortened() -> None:
    assert len(problems_of({"name": "a", "steps": "y" * 10_000})[0]) < 300


def test_sections_and_leaves_name_every_key_of_the_schema() -> None:
    assert "plugin" in sections(Config)
    assert "name" not in sections(Config)
    keys = leaves(Config)
    assert {"name", "plugin.budget.host", "freeze.except", "optim.schedule.name"} <= set(keys)


def test_a_hint_is_the_nearest_names_or_a_list_that_is_not_endless() -> None:
    assert suggest("zero9", ["zero1", "gemini"]) == "did you mean zero1?"
    assert suggest("x", ["alpha", "beta"]) == "known: alpha, beta"
    assert suggest("0", [f"name{i}" for i in range(500)]).endswith("and 480 more")
    assert suggest("x", []) == ""


def test_only_the_problems_that_are_printed_get_suggestions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(records, "suggest", lambda word, *_, **__: asked.append(word) or "")
    with pytest.raises(ConfigError) as refused:
        from_plain(Config, {f"key{number}": 1 for number in range(3000)})
    assert len(refused.value.problems) > 2999
    assert len(asked) <= MOST_PROBLEMS


def test_no_name_is_compared_with_a_text_of_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> list[str]:
        raise AssertionError("compared")

    monkeypatch.setattr("difflib.get_close_matches", slow)
    assert suggest("x" * 1_000_000, ["a", "b"]) == "known: a, b"


HUGE = [pytest.param(sign * 10**400, id=f"{sign}e400") for sign in (1, -1)]


@pytest.mark.parametrize("value", [*HUGE, 1 << 64, 1e300])
def test_integers_that_nothing_can_compute_with_are_refused(value: float) -> None:
    problems: list[Problem] = []
    assert read(int, value, key="k", problems=problems) is None
    assert read(int | None, value, key="k", problems=problems) is None
    assert ["expected an integer" in str(problem) for problem in problems] == [True, True]


@pytest.mark.parametrize("value", [*HUGE, math.inf, -math.inf, math.nan, 1e308, -1])
def test_every_number_can_be_shown(value: float) -> None:
    for form in (format_size, format_seconds, short_size, short_duration, shown_loss):
        assert len(form(value)) < 350
    assert all(shown(value, form) for form in (".0%", ",.0f", ".4f", ".3g"))


def test_documents_have_a_depth() -> None:
    deepest = "[" * DEEPEST + "]" * DEEPEST
    assert from_json(deepest) == from_json(deepest.encode())
    for text in (f"[{deepest}]", '{"a":' * 65 + "1" + "}" * 65, "[" * 100_000 + "]" * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            from_json(text)
    assert len(from_json(str([[] for _ in range(100)]))) == 100
    assert from_json('"' + "[" * 100 + '"') == "[" * 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    first: int = 1
    last: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Shared):
    zeroth: int = field(default=0, metadata=after(""))
    second: int = field(default=2, metadata=after("first"))
    third: int = field(default=3, metadata=after("second"))
    end: int = 5


def test_fields_are_shown_where_their_metadata_say_and_not_after_those_they_inherit() -> None:
    order = ["zeroth", "first", "second", "third", "last", "end"]
    assert list(to_plain(Section())) == list(field_types(Section)) == order


@pytest.mark.parametrize(
    ("section", "plan"),
    [
        (schema.Data, DataPlan),
        (schema.Part, PartPlan),
        (schema.Train, TrainPlan),
        (schema.Optim, OptimPlan),
        (schema.Checkpoint, CheckpointPlan),
        (schema.Elastic, ElasticPlan),
        (Notify, NotifyPlan),
        (schema.Distill, DistillPlan),
        (schema.Freeze, FreezePlan),
    ],
)
def test_a_setting_on_which_nothing_is_decided_is_declared_once(section: type, plan: type) -> None:
    assert set(section.__mro__) & set(plan.__mro__) > {object}
    assert section.__annotations__.items() & plan.__annotations__.items() == set()
