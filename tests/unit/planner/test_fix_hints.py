"""What is said to make a plan fit makes it fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from colotrain.planner.advise import other_meshes
from colotrain.planner.fix_hints import fix_hints
from colotrain.planner.machine import Machine
from colotrain.spec.divisions import Divisions
from colotrain.spec.memory import PeakRange
from colotrain.spec.plan import FreezePlan, ModelPlan, RunPlan
from colotrain.spec.survey import Survey
from tests.unit.known_surveys import resolve
from tests.unit.planner.test_resolve import LAPTOP, SERVER, survey, with_values

GEMINI = ("plugin.name", "gemini")
NO_DISK = ("plugin.disk_path", "none")


def large(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
    """A thousand times as many parameters in every matrix."""
    made = survey(model, freeze, seq_len)
    wide = tuple(
        replace(p, shape=(1000 * p.shape[0], p.shape[1]), numel=1000 * p.numel)
        for p in made.parameters
    )
    return replace(made, parameters=wide)


def with_memory(gib: float) -> Machine:
    return replace(LAPTOP, host_memory_bytes=int(gib * (1 << 30)))


def verdict(machine: Machine, *pairs: tuple[str, Any]) -> tuple[str, RunPlan, str]:
    plan, context = resolve(with_values(*pairs), survey=large, machine=machine)
    said = plan.peak.verdict(plan.cluster.memory_bytes)
    return said, plan, fix_hints(context, plan)


def settings_of(text: str) -> list[list[tuple[str, Any]]]:
    """What every hint says is to be set."""
    found = []
    for hint in text.split(" or "):
        pairs = re.findall(r"([a-z_.]+)=(\w+)", hint)
        named = [("plugin.name" if key == "plugin" else key, value) for key, value in pairs]
        found.append([(k, int(v) if v.isdecimal() else v) for k, v in named])
    return found


@pytest.mark.parametrize("gib", [1.3, 1.6, 2, 2.5, 2.8])
@pytest.mark.parametrize(
    "own", [[("plugin.name", "zero1")], [("plugin.name", "zero3")], [GEMINI, NO_DISK]]
)
def test_each_hint_makes_the_plan_fit_on_the_machine_or_machines_that_it_names(
    gib: float, own: list[tuple[str, Any]]
) -> None:
    machine = with_memory(gib)
    said, plan, hints = verdict(machine, *own)
    assert said != "yes"
    for changes in settings_of(hints.partition("(accumulation")[0]):
        assert changes, hints
        assert verdict(machine, *own, *changes)[0] == "yes", hints
        nodes = dict(changes).get("cluster.nodes", plan.cluster.nodes)
        assert (nodes > plan.cluster.nodes) == (f"{nodes} such machines would do" in hints)


def test_what_this_machine_can_do_comes_first() -> None:
    assert verdict(with_memory(2), ("plugin.name", "zero3"))[2] == "set plugin=gemini"


def test_what_fits_nowhere_says_how_much_it_needs() -> None:
    _, _, hints = verdict(with_memory(0.5), ("plugin.name", "zero3"))
    assert re.fullmatch(
        r"use a smaller model or more memory: even plugin=zero3 with micro-batches of 1 needs "
        r"[\d.]+ [KMG]iB per rank",
        hints,
    )


def test_more_machines_are_named_only_where_nothing_helps_on_this_one() -> None:
    config = with_values(("plugin.name", "zero3"))
    plan, context = resolve(config, survey=large, machine=with_memory(2))

    def changed_plan(changes: dict[str, Any]) -> RunPlan:
        fits = changes.get("cluster.nodes") == 4
        return replace(plan, peak=PeakRange(exact=1 if fits else 1 << 40))

    hints = fix_hints(replace(context, changed_plan=changed_plan), plan)
    assert hints.startswith("nothing makes it fit here; 4 such machines would do: cluster.nodes=4")


def divisible(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
    how = Divisions(dims={"*": 0}, sizes={"width": 64})
    return replace(large(model, freeze, seq_len), divisions=how)


def of_experts(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
    how = Divisions(dims={"*": 0}, sizes={"num_experts": 4})
    return replace(large(model, freeze, seq_len), experts=how)


@pytest.mark.parametrize(("key", "survey"), [("mesh.tp", divisible), ("mesh.ep", of_experts)])
def test_ranks_that_divide_matrices_or_experts_are_named_where_nothing_else_helps(
    key: str, survey: Any
) -> None:
    machine, own = replace(SERVER, device_memory_bytes=2200 << 20), ("plugin.name", "zero3")
    plan, context = resolve(with_values(own), survey=survey, machine=machine)
    hints = fix_hints(context, plan)
    (changes,) = settings_of(hints.partition("(accumulation")[0])
    assert (key, 2) in changes, hints
    made, _ = resolve(with_values(*changes), survey=survey, machine=machine)
    assert made.peak.verdict(made.cluster.memory_bytes) == "yes"
    assert "mesh" not in verdict(machine, own)[2]  # a model that cannot be divided


@pytest.mark.parametrize("procs", [1, 4, 8])
def test_every_other_product_of_axes_that_a_node_holds_is_an_alternative(procs: int) -> None:
    def both(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
        experts = Divisions(dims={"*": 0}, sizes={"num_experts": 4})
        made = divisible(model, freeze, seq_len)
        return replace(made, divides_sequences=True, experts=experts)

    own = (("cluster.procs_per_node", procs), ("train.micro_batch", 2), ("mesh.cp", 1))
    plan, context = resolve(with_values(*own), survey=both, machine=replace(SERVER, num_devices=8))
    found = [(o.mesh.cp, o.mesh.tp, o.mesh.ep) for o in other_meshes(context, plan)]
    sizes = range(1, procs + 1)
    pairs = {(cp, tp) for cp in sizes for tp in sizes if procs % (cp * tp) == 0 and 64 % tp == 0}
    experts = {(1, 1, ep) for ep in (2, 4) if procs % ep == 0}
    assert {axes for axes in found if axes[2] == 1} == {(*both, 1) for both in pairs - {(1, 1)}}
    assert {axes for axes in found if axes[2] > 1} >= experts
    assert len(found) == len(set(found))
    assert all(4 % ep == 0 and procs % ep == 0 for _, _, ep in found)
    for option in other_meshes(context, plan):
        groups = procs // option.mesh.together
        accumulated = option.layout.micro_batch * option.layout.accumulation_steps
        assert accumulated * groups == plan.batch.global_batch
