"""A smoke run's plan, and what it makes of two launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.events.event import Event
from colotrain.launch import smoke
from colotrain.rundir import RunDir
from colotrain.runs.resolving import plan_from, resolve_config
from colotrain.spec.plan import READ_BACK, RunPlan
from tests.running import SMALL

LONG = (
    *SMALL,
    *("data.seq_len=4096", "train.max_steps=1000", "train.global_batch=64", "train.eval_steps=8"),
    *("optim.schedule.warmup_steps=100", "elastic.max_restarts=5", "checkpoint.keep=4"),
    *("observe.trackers=[tensorboard]", "observe.grads_every=50", "train.precision=bf16"),
    *("freeze.patterns=['embed*','blocks.0.*']", "freeze.unfreeze={100:[embed*],200:[blocks.0.*]}"),
)


def smoke_plan(*overrides: str) -> RunPlan:
    return resolve_config([*overrides], smoke=True).plan


def test_the_plan_is_shrunk_and_what_would_come_later_comes_at_once() -> None:
    plan, whole = smoke_plan(*LONG, "plugin=zero3"), plan_from([*LONG, "plugin=zero3"])
    assert plan.smoke
    assert not whole.smoke
    assert plan.train.max_steps == 2
    batch = plan.batch
    assert (batch.global_batch, batch.micro_batch, batch.accumulation_steps) == (4, 1, 2)
    assert (plan.data.seq_len, plan.train.eval_steps, plan.observe.grads_every) == (128, 1, 1)
    assert (plan.observe.trackers, plan.elastic.max_restarts) == ((), 0)
    assert plan.freeze.patterns == ("embed*", "blocks.0.*")
    assert plan.freeze.unfreeze == {1: ("embed*", "blocks.0.*")}
    assert (plan.plugin.name, plan.world_size, plan.train.precision) == ("zero3", 2, "bf16")
    assert plan.optim == whole.optim


def test_nothing_is_warned_of_a_length_that_is_not_the_runs_own() -> None:
    warm = (*SMALL, "optim.schedule.warmup_steps=100", "train.max_steps=50")
    assert not any("the run ends after" in line for line in smoke_plan(*warm).warnings)
    assert any("the run ends after" in line for line in plan_from(warm).warnings)


@pytest.mark.parametrize("plugin", ["zero1", "zero2", "zero3", "fsdp-hybrid", "gemini"])
def test_the_plugin_and_the_ranks_stay(plugin: str) -> None:
    plan = smoke_plan(*SMALL, f"plugin={plugin}", "train.global_batch=4")
    assert (plan.plugin.name, plan.world_size) == (plugin, 2)
    assert plan.batch.accumulation_steps == 1  # as planned: nothing accumulates


def test_ranks_and_plugin_that_were_chosen_for_the_whole_plan_are_those_of_its_smoke_run() -> None:
    whole = plan_from(["recipe=llm-tiny"])
    plan = smoke_plan("recipe=llm-tiny")
    assert (plan.world_size, plan.plugin.name) == (whole.world_size, whole.plugin.name)


def test_settings_that_stop_a_short_run_do_not_stop_this_one() -> None:
    odd = ("checkpoint.every=0", "train.on_nonfinite=stop", "elastic.check_every=0")
    assert smoke_plan(*SMALL, *odd).checkpoint.every == 1
    rollback = ("checkpoint.every=100", "train.on_nonfinite=rollback")
    assert smoke_plan(*SMALL, *rollback).checkpoint.every == 1
    wsd = ("optim.schedule.name=wsd", "optim.schedule.decay_steps=50")
    assert smoke_plan(*SMALL, *wsd).train.max_steps == 2
    nodes = ("cluster.nodes=2", "elastic.min_nodes=1", "elastic.max_nodes=4")
    nodes += ("elastic.spare_nodes=1", "elastic.replace_slow=true")
    elastic = resolve_config(
        [*SMALL, *nodes, "train.global_batch=48"], here=False, smoke=True
    ).plan.elastic
    assert (elastic.min_nodes, elastic.launchers, elastic.replace_slow) == (2, 2, False)


def test_its_name_is_its_own_and_never_the_real_runs() -> None:
    assert smoke_plan(*SMALL, "name=real").name.startswith("real-smoke-2")
    unnamed = smoke_plan(*SMALL, "plugin=zero1").name
    assert re.fullmatch(r"llm-tiny-zero1-smoke-\d{8}-\d{6}", unnamed)
    by_hand = (
        "cluster.nodes=2",
        "cluster.node_rank=1",
        "cluster.rdzv_endpoint=node0:29500",
        "name=real",
    )
    assert resolve_config([*SMALL, *by_hand], several=True, smoke=True).plan.name == "real-smoke"


def test_a_sweep_has_no_smoke_run(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "submit"):
        assert guarded([verb, *SMALL, "--sweep", "train.seed=0,1", "--smoke"]) == 2
        assert "--smoke: cannot be had beside --sweep" in capsys.readouterr().err


def launches(*stops: str, codes: tuple[int, ...]) -> Callable[..., tuple[int, str]]:
    """A `launch` whose ranks stop for these reasons, one launch after the other."""
    left = iter(zip(stops, codes, strict=True))

    def launch(
        plan: object, rundir: object, *, follow: Callable, **where: object
    ) -> tuple[int, str]:
        reason, code = next(left)
        event = Event(
            t=0.0, kind="stopped", rank=0, attempt=0, fields={"step": 1, "reason": reason}
        )
        follow([event] if reason else [])
        return code, ""

    return launch


@pytest.mark.parametrize(
    ("stops", "codes", "exit_code"),
    [
        ((READ_BACK, ""), (75, 0), 0),
        ((READ_BACK, READ_BACK), (75, 75), 1),  # nothing was resumed
        (("asked to stop", ""), (75, 0), 75),
        ((READ_BACK, ""), (130, 0), 130),  # interrupted while it saved
        (("", ""), (1, 0), 1),
    ],
)
def test_the_second_launch_follows_the_first_only_where_that_saved_its_step(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stops: tuple[str, ...],
    codes: tuple[int, ...],
    exit_code: int,
) -> None:
    monkeypatch.setattr(smoke, "launch", launches(*stops, codes=codes))
    plan = smoke_plan(*SMALL)
    assert smoke.launch_and_resume(plan, RunDir(tmp_path))[0] == exit_code
