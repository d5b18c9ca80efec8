"""What a step on a CUDA device costs and keeps, and mistakes that must be found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.representatives import any_without_parameters, representatives, selected
from tests.simulated.case import Case
from tests.simulated.ordering import Memory, Timeline
from tests.simulated.running import SMALL, WIDER, Found, apart, carry_out

pytestmark = pytest.mark.timeout(1800)  # seconds, for the module's fixture runs all cases

STEPS = 4
PLACING = 2
"""Waits of a run for the first step's memory, from which all ranks decide where groups rest."""
QUIET = ("train.eval_steps=0",)
TRAIN = ("train.max_steps=4", "train.micro_batch=2")
SAVING = ("train.micro_batch=2", "checkpoint.every=3")
GEMINI = (*WIDER, *TRAIN, "plugin=gemini")
BELOW = "plugin.budget.device=30MiB"
USER = "model.target=tests.simulated.models:Mean"
MIB = 1 << 20
PLANNED = {
    "zero1": ("plugin=zero1",),
    "zero2": ("plugin=zero2",),
    "zero3": ("plugin=zero3",),
    "zero3 in bf16": ("plugin=zero3", "train.precision=bf16"),
    "zero1, recomputing": ("plugin=zero1", "train.activation_checkpointing=full"),
    "zero3, recomputing some": ("plugin=zero3", "train.activation_checkpointing=selective"),
}
BUDGETS = {"100 %": 60 * MIB, "50 %": 30 * MIB, "25 %": 21 * MIB}
"""Of the states' bytes, which are 57 MiB; 25 % and what computing needs itself."""


def saving(name: str, plugin: str, *words: str) -> list[Case]:
    """A run of six steps, and one of three that is resumed."""
    base = (*SMALL, *SAVING, f"plugin={plugin}", *words)
    plant = "each_step_copied" if name == IN_MEMORY else ""
    whole = Case(name=f"{name} whole", words=(*base, "train.max_steps=6"), plant=plant)
    begun = replace(whole, name=f"{name} begun", run=f"{name} run")
    begun = replace(begun, words=(*base, "train.max_steps=3"))
    more = replace(whole, name=f"{name} resumed", run=f"{name} run", attempt=1)
    return [whole, begun, more]


IN_MEMORY = "zero2 from memory"
RESUMED = {
    "zero1": ("zero1",),
    "zero3 in bf16": ("zero3", "train.precision=bf16"),
    "zero2, not behind": ("zero2", "checkpoint.async=false"),
    "gemini below": ("gemini", "plugin.budget.device=4MiB", "model.args.d_model=128"),
    IN_MEMORY: ("zero2", "elastic.memory_copy=64MiB"),
}
KEPT = ("zero1", "zero3 in bf16", "zero3, recomputing some")
"""Cases of `PLANNED` that `make test` has."""
FROZEN = ("freeze.patterns=[blocks.0.*,blocks.1.*]",)
NOT_FINITE = ("model.target=tests.simulated.models:Explodes", "train.on_nonfinite=skip")
RECORDED = ("plugin=zero3", "observe.grads_every=1", "train.eval_every=2")

FIXED = [
    *(
        Case(name=f"{name} on {on}", words=(*SMALL, *TRAIN, *words), on=on)
        for name, words in (("user", (USER,)), ("recorded", RECORDED), ("huge", NOT_FINITE))
        for on in ("cpu", "cuda")
    ),
    Case(name="no wait", words=(*GEMINI, *QUIET, BELOW), plant="no_wait_stream"),
    Case(
        name="no synchronize", words=(*GEMINI, BELOW, "checkpoint.every=2"), plant="no_synchronize"
    ),
    Case(name="hybrid", words=(*SMALL, *TRAIN, "plugin=fsdp-hybrid", *QUIET)),
    Case(name="slow", words=(*SMALL, *TRAIN, *QUIET), plant="slow_optimizer", looks=False),
    Case(name="stays", words=(*SMALL, *TRAIN), plant="stays_on_host"),
    Case(
        name="frozen",
        words=(*SMALL, *TRAIN, *QUIET, "plugin=zero1", "train.precision=bf16", *FROZEN),
        looks=False,
    ),
]
"""Cases of the tests without parameters."""


@pytest.fixture(scope="module")
def found(
    guard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Found]:
    wanted = {name for (name,) in selected(request, "name")}
    if any_without_parameters(request):
        wanted |= {case.name for case in FIXED} | {"25 %"}
    disk = tmp_path_factory.mktemp("disk")
    lower = (f"plugin.disk_path={disk}", "plugin.budget.host=20MiB")
    unread = (*((*budget, ()) for budget in BUDGETS.items()), ("disk", 30 * MIB, lower))
    cases = [
        *(
            Case(name=n, words=(*WIDER, *TRAIN, *QUIET, *words), looks=False)
            for n, words in PLANNED.items()
        ),
        *(
            Case(name=n, words=(*GEMINI, *QUIET, f"plugin.budget.device={size}"), limit=size)
            for n, size in BUDGETS.items()
        ),
        Case(name="disk", words=(*GEMINI, *QUIET, BELOW, *lower), limit=30 * MIB),
        *(
            Case(
                name=f"{n}, unread",
                words=(*GEMINI, *QUIET, f"plugin.budget.device={size}", *more),
                looks=False,
            )
            for n, size, more in unread
        ),
        Case(name="adafactor", words=(*SMALL, *TRAIN, *QUIET, "optim.name=adafactor"), looks=False),
        Case(name="noted", words=(*SMALL, *TRAIN, *QUIET, "observe.grads_every=1"), looks=False),
        *FIXED,
    ]
    cases = [case for case in cases if case.name in wanted]
    cases += [c for n, words in RESUMED.items() if n in wanted for c in saving(n, *words)]
    cases += [Case(name="cpu", words=(*WIDER, *TRAIN, "plugin=zero1"), on="cpu")]
    return carry_out(cases, tmp_path_factory.mktemp("device"), guard)


@pytest.mark.parametrize(
    "name", representatives(["zero1", "zero2", "zero3", "zero3 in bf16"], kept=KEPT[:2])
)
def test_the_host_waits_once_per_step(name: str, found: dict[str, Found]) -> None:
    assert sum(found[name].waits.values()) == STEPS, found[name].waits


@pytest.mark.parametrize(
    "name", representatives([f"{size}, unread" for size in BUDGETS], kept=["25 %, unread"])
)
def test_so_it_does_where_parameters_and_states_are_on_the_host(
    name: str, found: dict[str, Found]
) -> None:
    """An update on the host follows the step's one wait, so that it needs no other."""
    tiers = found[name].events("tiers")[-1]["bytes"]
    assert "host" in tiers["optimizer"]
    assert ("host" in tiers["gradients"]) == (name != "100 %, unread")
    waits = found[name].waits
    assert sum(n for where, n in waits.items() if "offload/" in where) == PLACING, waits
    assert sum(waits.values()) == STEPS + PLACING, waits
    assert found[name].races == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disk, unread"])
def test_for_the_disk_it_waits_once_per_group_and_copy(name: str, found: dict[str, Found]) -> None:
    """Only the host reads and writes a file's pages: before a copy up, and after one down."""
    tiers = found[name].events("tiers")[-1]["bytes"]
    assert "disk" in tiers["gradients"]
    waits = {where: n for where, n in found[name].waits.items() if "blocks.py" in where}
    micro_batches, groups = 4 * STEPS, 5
    copies = micro_batches * groups * 4 + STEPS * groups * 2  # two gathers, gradients up and down
    assert 0 < sum(waits.values()) <= copies
    first_update = sum(n for where, n in found[name].waits.items() if "group_storage.py" in where)
    others = sum(found[name].waits.values()) - sum(waits.values()) - first_update
    assert others == STEPS + PLACING, found[name].waits


@pytest.mark.parametrize(("name", "more"), [("adafactor", 0), ("noted", 1)])
def test_so_it_does_with_adafactor_and_once_more_for_a_record(
    name: str, more: int, found: dict[str, Found]
) -> None:
    records = len(found[name].events("gradients"))
    assert (records > 0) == (more > 0)
    assert sum(found[name].waits.values()) == STEPS + more * records, found[name].waits


def test_an_update_s_time_is_the_device_s_and_not_that_of_the_data(found: dict[str, Found]) -> None:
    slow = found["slow"]
    first, *later = slow.laps
    assert first["optimizer_s"] is None
    assert all(10 < laps["optimizer_s"] < 11 for laps in later)
    for laps in slow.laps:
        assert 0 <= laps["data_s"] < laps["compute_s"] < 5
        assert 0 < laps["reduce_s"] < 1
    assert sum(slow.waits.values()) == STEPS, slow.waits


@pytest.mark.parametrize(
    "name",
    [
        *representatives(PLANNED, kept=KEPT),
        "25 %",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("100 %", "50 %", "disk")),
    ],
)
def test_the_plan_is_the_peak(name: str, found: dict[str, Found]) -> None:
    assert found[name].races == []
    assert found[name].planned == pytest.approx(found[name].peak, rel=0.03)


@pytest.mark.parametrize("name", representatives(PLANNED, kept=KEPT))
def test_fully_shard_copies_nothing_on_one_rank(name: str, found: dict[str, Found]) -> None:
    """Neither parameters nor gradients: it makes their memory, and colotrain casts into it."""
    lines = [line for line in found[name].launches if line.startswith("torch _fsdp")]
    assert [line for line in lines if not line.startswith("torch _fsdp_param.py")] == []


def test_frozen_parameters_are_cast_in_the_first_step_alone(found: dict[str, Found]) -> None:
    """Of four groups, two are frozen; each has one launch for all of its parameters."""
    casts = Counter(
        {line: n for line, n in found["frozen"].launches.items() if "fsdp_internals" in line}
    )
    assert casts.total() == 4 + 2 * (STEPS - 1), casts
    assert found["frozen"].races == []


@pytest.mark.parametrize("name", representatives([*BUDGETS, "disk"], kept=["25 %", "disk"]))
def test_gemini_trains_below_its_budget(name: str, found: dict[str, Found]) -> None:
    losses, gradients = apart(found[name], found["cpu"])
    assert found[name].races == []
    assert losses < 1e-5
    assert gradients < 1e-4


def test_page_locked_memory_is_not_rounded_up(found: dict[str, Found]) -> None:
    states = found["25 %"].events("tiers")[-1]["bytes"]
    on_host = sum(kind.get("host", 0) for kind in states.values())
    assert found["25 %"].pinned == pytest.approx(on_host, rel=0.05)


@pytest.mark.parametrize("name", representatives(RESUMED, kept=["gemini below", IN_MEMORY]))
def test_a_resumed_run_goes_on_bit_for_bit(name: str, found: dict[str, Found]) -> None:
    whole, begun, more = (found[f"{name} {part}"] for part in ("whole", "begun", "resumed"))
    assert whole.races == begun.races == more.races == []
    assert more.losses == whole.losses
    (resumed,) = more.events("resumed")
    assert (resumed["step"], bool(resumed.get("in_memory"))) == (3, name == IN_MEMORY)
    if name == IN_MEMORY:  # a save's copies and those in memory take the same room
        saved = whole.events("checkpoint_started")[0]["bytes"]
        assert whole.pinned == pytest.approx(2 * saved, rel=0.05)
    assert any(key.startswith("5:") for key in more.gradients)
    for key, gradient in more.gradients.items():
        assert torch.equal(gradient, whole.gradients[key]), key


def test_a_user_model_trains_as_on_the_cpu(found: dict[str, Found]) -> None:
    losses, gradients = apart(found["user on cuda"], found["user on cpu"])
    assert found["user on cuda"].races == []
    assert losses < 1e-5
    assert gradients < 1e-4


def test_evaluation_and_gradient_records_are_those_of_the_cpu(found: dict[str, Found]) -> None:
    here, there = found["recorded on cuda"], found["recorded on cpu"]
    assert here.races == []
    assert len(here.events("eval")) == len(there.events("eval")) > 1
    for mine, its in zip(here.events("eval"), there.events("eval"), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], abs=1e-5)
    records = list(zip(here.events("gradients"), there.events("gradients"), strict=True))
    assert len(records) == STEPS
    for mine, its in records:
        for column in ("norm", "max_abs", "update_ratio"):
            assert mine[column] == pytest.approx(its[column], rel=1e-3, abs=1e-7), column


def test_the_first_value_that_is_not_finite_is_found(found: dict[str, Found]) -> None:
    here, there = found["huge on cuda"], found["huge on cpu"]
    assert here.races == []
    assert here.events("nonfinite") == there.events("nonfinite") != []


def test_all_process_groups_wait_equally_long(found: dict[str, Found]) -> None:
    assert found["hybrid"].shortest_timeout_s == found["hybrid"].timeout_s


def test_a_missing_wait_between_streams_is_a_race(found: dict[str, Found]) -> None:
    assert any(race.startswith("race: stream") for race in found["no wait"].races)


def test_a_missing_wait_of_the_host_is_a_race(found: dict[str, Found]) -> None:
    races = found["no synchronize"].races
    assert any("the host" in race for race in races), races


def test_an_operand_on_the_cpu_is_an_error(found: dict[str, Found]) -> None:
    assert "two devices" in (found["stays"].error or "")


def test_what_a_timeline_does_not_know_is_a_race() -> None:
    one, two = Timeline("one"), Timeline("two")
    memory = Memory(one, True, "here")
    assert memory.use(one, one.tick(), "a write", writes=True) == []
    assert memory.use(two, two.tick(), "a read", writes=False) != []
    two.follow(one.known)
    assert memory.use(two, two.tick(), "a read", writes=False) == []
    assert memory.use(one, one.tick(), "a write", writes=True) != []
