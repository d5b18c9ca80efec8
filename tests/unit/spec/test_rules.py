"""What excludes what: rows of the table are about settings that exist, and told in a line."""

from __future__ import annotations

import pytest

from colotrain.config.schema import Config
from colotrain.errors import ConfigError
from colotrain.records import leaves
from colotrain.runs.resolving import plan_from
from colotrain.spec.rules import RULES, Rule, check_rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.when} {rule.key}")
def test_a_rule_is_about_settings_that_exist(rule: Rule) -> None:
    conditions = rule.when.split(" and ")
    keys = {condition.removesuffix(">1").partition("=")[0] for condition in conditions}
    assert {*keys, rule.key} <= leaves(Config).keys()
    assert rule.key not in keys


def test_no_two_rules_say_the_same() -> None:
    assert len({(rule.when, rule.key) for rule in RULES}) == len(RULES)


def test_conditions_are_values_numbers_above_one_and_settings_that_are_given() -> None:
    values = {"a": "x", "b": None, "c": 2, "d": [], "e": False, "f": "given"}
    met = [w for w in ("a=x", "b=null", "c>1", "e=false", "f") if Rule(w, "a", ()).applies(values)]
    assert met == ["a=x", "b=null", "c>1", "e=false", "f"]
    for condition in ("a=y", "a=null", "c=1", "e=true", "b", "d"):
        assert not Rule(condition, "a", ()).applies(values)
    assert not Rule("c>1", "a", ()).applies({**values, "c": 1})
    assert Rule("c>1 and a=x", "b", ()).applies(values)
    assert not Rule("c>1 and a=y", "b", ()).applies(values)
    assert Rule("a=w,x", "b", ()).applies(values)
    assert not Rule("a=y,z", "b", ()).applies(values)


def test_a_setting_without_effect_excludes_nothing() -> None:
    """As in a sweep over mesh.tp: there, nothing is divided by `mesh.sequence_parallel`."""
    stages = ["mesh.pp=2", "mesh.pp_schedule=interleaved", "model.args.num_layers=4"]
    words = ["recipe=llm-tiny", "mesh.sequence_parallel=true", "cluster.procs_per_node=4", *stages]
    assert plan_from(words, here=False).mesh.pp == 2
    with pytest.raises(ConfigError) as caught:
        plan_from([*words, "mesh.tp=2"], here=False)
    assert "expected 1f1b with mesh.pp=2 and mesh.tp=2 and mesh.sequence" in str(caught.value)


def test_a_problem_names_the_condition_what_is_allowed_and_the_fix() -> None:
    values = {"mesh.tp": 4, "train.compile": True}
    rule = Rule("mesh.tp>1", "train.compile", (False,), "a reason")
    assert str(rule.problem(values)) == (
        "train.compile=true: expected false with mesh.tp=4: a reason; set train.compile=false"
    )
    either = Rule("train.objective=dpo,orpo", "mesh.tp", (1,))
    found = either.problem({"mesh.tp": 4, "train.objective": "orpo"})
    assert "expected 1 with train.objective=orpo;" in str(found)
    one_of = Rule("mesh.tp>1", "train.compile", ("a", "b", "c"), fix="take another")
    assert "expected one of a, b, c with mesh.tp=4; take another" in str(one_of.problem(values))


def test_all_problems_come_at_once() -> None:
    words = ["recipe=llm-tiny", "mesh.tp=2", "optim.rounding=kahan", "optim.name=adamw8bit"]
    with pytest.raises(ConfigError) as caught:
        plan_from([*words, "train.stop_early.metric=loss", "train.eval_steps=0"])
    keys = {problem.key for problem in caught.value.problems}
    assert keys >= {"mesh.tp", "optim.rounding", "optim.name", "train.stop_early.metric"}
    assert list(check_rules({**dict.fromkeys(leaves(Config)), **allowed()})) == []


def allowed() -> dict[str, object]:
    """A value of each key that rules limit, which all of them allow."""
    choices: dict[str, list[object]] = {}
    for rule in RULES:
        kept = choices.setdefault(rule.key, list(rule.allowed))
        choices[rule.key] = [value for value in kept if value in rule.allowed]
    return {key: values[0] for key, values in choices.items()}
