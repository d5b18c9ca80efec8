"""What runs in a fork leaves nothing in the process, and a model's trials run in forks."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from colotrain import forked, torch_internals
from colotrain.engine.build.sequence import find_sequence
from colotrain.engine.sharding.grouping import find_groups
from colotrain.errors import ConfigError, Problem
from colotrain.forked import in_fork
from colotrain.models.loading import build, build_on_meta
from colotrain.planner.dependencies import record_trial
from colotrain.planner.traced.survey import Survey
from colotrain.spec.plan import DataPlan, FreezePlan, ModelPlan

SURVEY = "colotrain.planner.traced.survey"
CHANGES: list[int] = []
TABLES: dict[int, Tensor] = {}


@functools.lru_cache
def cached_table(width: int) -> Tensor:
    """Values from 0.5 to 1.5.

    Not by `torch.linspace`: where transformers' from_pretrained was the first in a process to make
    a model on the meta device, torch.linspace makes values there from then on.
    """
    return torch.arange(width) / (width - 1) + 0.5


def kept_table(width: int) -> Tensor:
    if width not in TABLES:
        TABLES[width] = torch.linspace(0.1, 0.9, width)
    return TABLES[width]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        import imported_late

        table: Tensor = imported_late.TABLE + kept_table(8) + cached_table(8)
        return x + self.linear(x) * table


class Keeps(nn.Module):
    """Keeps tables outside of its modules, as constructors and forwards make them."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", cached_table(8), persistent=False)
        if looks:
            self.total = float(cached_table(8).sum().item())
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def samples() -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(8)}]


def surveyed(plan: ModelPlan) -> None:
    found, _ = record_trial(f"{SURVEY}:survey", plan, FreezePlan(), 8)
    assert isinstance(found, Survey)
    assert len(found.parameters) == 6


def traced(plan: ModelPlan) -> None:
    target = f"{__name__}:samples"
    data = DataPlan(
        source="target", target=target, seq_len=8, tokenizer="", shuffle=False,
        validation_fraction=0.0,
    )  # fmt: skip
    how = "fp32", "none", "cpu", 1
    found, _ = record_trial(f"{SURVEY}:trace_micro_batch", plan, FreezePlan(), data, *how)
    assert plan.args or not isinstance(found, str), found


def grouped(plan: ModelPlan) -> None:
    groups = find_groups(build(plan, seed=0), chunk_bytes=None, batch={"x": torch.ones(1, 8)})
    assert [name for name, _ in groups] == ["blocks.0", "blocks.1"]


def in_sequence(plan: ModelPlan) -> None:
    found = find_sequence(build(plan, seed=0), {"x": torch.ones(1, 8)})
    assert found.blocks == ("blocks.0", "blocks.1"), found.against


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("trial", [surveyed, traced, grouped, in_sequence])
def test_trials_of_a_model_leave_no_tensor_without_values(
    trial: Callable[[ModelPlan], None],
    looks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "imported_late.py").write_text("import torch\nTABLE = torch.linspace(0, 1, 8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    cached_table.cache_clear()
    TABLES.clear()
    plan = ModelPlan(target=f"{__name__}:Keeps", args={"looks": True} if looks else {})
    trial(plan)
    assert build(plan, seed=0)(torch.ones(1, 8)).isfinite()


def test_a_constructor_that_looks_at_values_leaves_none_without(tmp_path: Path) -> None:
    cached_table.cache_clear()
    plan = ModelPlan(target=f"{__name__}:Keeps", args={"looks": True})
    assert build_on_meta(plan) is None
    assert build(plan, seed=0).get_buffer("table").sum() == 8


def refuse() -> None:
    raise ConfigError([Problem(key="model.target", expected="another")])


def test_results_and_errors_of_a_fork_are_those_of_the_function() -> None:
    assert in_fork(lambda: (CHANGES.append(1), os.getpid())[1]) != os.getpid()
    assert CHANGES == []
    with pytest.raises(ConfigError, match=r"model\.target: expected another"):
        in_fork(refuse)


@pytest.mark.parametrize(
    "fails",
    [
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: sys.exit(0),
        lambda: 1 / 0,
        lambda: threading.Event().wait(60),
        torch.cuda._lazy_init,
    ],
)
def test_where_a_fork_has_no_answer_the_function_is_called_here(
    fails: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "cannot_use_cuda", lambda: True)
    monkeypatch.setattr(forked, "IDLE_S", 2.0)
    own = os.getpid()

    def function() -> str:
        if os.getpid() != own:
            try:
                fails()
            except torch_internals.NeedsCUDA:  # no `except Exception` takes it
                raise
        return "here" if os.getpid() == own else "there"

    assert in_fork(function) == "here"
    assert in_fork(lambda: lambda: 1)() == 1, "what cannot be pickled is made here"


def test_what_a_fork_prints_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end=" ")
    assert in_fork(lambda: print("within", end=" ")) is None
    print("after")
    sys.stdout.flush()
    assert capfd.readouterr().out == "before within after\n"


class Threaded:
    """Ends a process that is not its own when it is collected, as threads of C++ do."""

    def __init__(self) -> None:
        self.owner, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.abort()


def test_a_fork_does_not_collect_what_its_parent_left() -> None:
    gc.disable()
    try:
        Threaded()

        def collected() -> int:
            gc.collect()
            return os.getpid()

        assert in_fork(collected) != os.getpid()
    finally:
        gc.enable()
