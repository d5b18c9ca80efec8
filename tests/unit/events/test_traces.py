"""A trace's table divides the steps among spans, and a span costs nothing while none is taken."""

from __future__ import annotations

import gzip
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.cli import profile as module
from colotrain.cli.main import guarded
from colotrain.config.observing import profile_plan
from colotrain.config.schema import Profile
from colotrain.engine.sharding import spans
from colotrain.errors import ConfigError
from colotrain.events import traces
from colotrain.events.kinds import LaunchEnded, Traced
from colotrain.events.log import EventWriter
from colotrain.events.traces import PREFIX, break_down
from colotrain.rundir import RunDir
from colotrain.runs.resolving import resolve_config
from colotrain.spec.phases import Phase
from tests.unit.events.test_view import plan_of


def event(name: str, ts: float, dur: float, *, cat: str = "user_annotation", tid: int = 1) -> Any:
    name = PREFIX + name if cat == "user_annotation" else name
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


TRACE = {
    "traceEvents": [
        event("step 4", 0, 1000),
        event("data", 10, 90),
        event("forward", 100, 300),
        event("forward blocks.0", 120, 200),
        event("gather blocks.0", 130, 50),
        event("backward", 400, 400),
        event("backward blocks.0", 450, 300, tid=2),  # on autograd's own thread
        event("reduce blocks.0", 700, 100, tid=2),  # half of it after its block's end
        event("update", 800, 150),
        event("search for corruption", 960, 20),
        event("checkpoint", 1100, 100),  # between two steps
        event("step 5", 2000, 1000),
        event("update", 2100, 50),
        event("aten::mm", 100, 5, cat="cpu_op"),
        event("mm", 100, 100, cat="kernel"),
        event("copy", 150, 100, cat="gpu_memcpy"),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_the_parts_of_steps_sum_up_to_the_steps() -> None:
    found = break_down(TRACE)
    assert found.steps == (4, 5)
    assert found.step_s == pytest.approx(1e-3)
    in_us = {name: seconds * 2e6 for name, seconds in found.parts.items()}
    assert in_us == pytest.approx(
        {
            "data": 90,
            "forward": 250,
            "gather": 50,
            "backward": 350,
            "reduce": 50,
            "update": 200,
            "search for corruption": 20,
            "other": 990,
        }
    )
    assert list(found.parts)[-1] == "other"
    assert found.blocks["blocks.0"]["forward"] * 2e6 == pytest.approx(150)
    assert found.blocks["blocks.0"]["backward"] * 2e6 == pytest.approx(250)
    assert found.device_s == pytest.approx(150e-6 / 2)


def test_a_trace_without_steps_is_no_trace_of_ours() -> None:
    with pytest.raises(ValueError, match="no steps"):
        break_down({"traceEvents": [event("mm", 0, 1, cat="kernel")]})


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    rundir = RunDir(tmp_path / "runs" / "mine")
    rundir.create()
    rundir.write_plan(plan_of())
    with EventWriter(rundir.launcher_events) as events:
        events.write(LaunchEnded(status="finished", exit_code=0, cause=""))
    return rundir


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def test_a_run_that_is_over_shows_its_newest_trace(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        path = rundir.trace_file(first=4, last=5, rank=rank)
        write(path, gzip.compress(json.dumps(TRACE).encode()))
    assert guarded(["profile", "mine"]) == 0
    out = capsys.readouterr().out
    assert "rank 1, steps 4 to 5: 1.0 ms a step; the GPU was busy for 0.1 ms" in out
    assert guarded(["profile", "mine", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [trace["steps"] for trace in document["traces"]] == [[4, 5], [4, 5]]


def packed(**changed: Any) -> bytes:
    return json.dumps({"traceEvents": [{**event("step 1", 0, 1), **changed}]}).encode()


WRONG = {
    "other": b"{}",
    "list": b"[1]",
    "numbers for events": b'{"traceEvents": [1]}',
    "number of events": b'{"traceEvents": 1}',
    "deep": b'{"traceEvents": ' + b"[" * 200_000,
    "a huge time": packed(ts=10**400),
    "a huge step": packed(name=f"{PREFIX}step {'9' * 5000}"),
    "no step": packed(name=f"{PREFIX}step "),
    "unpacked": b" " * 2_000_000,
    "values": b"[" + b"[]," * 200_000,
}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"junk", gzip.compress(b"[1]")[:9], gzip.compress(b"{}" * 99)[:10] + b"\xff" * 20),
        *map(gzip.compress, WRONG.values()),
    ],
    ids=["empty", "junk", "cut", "damaged", *WRONG],
)
def test_a_trace_that_cannot_be_read_is_one_line(
    rundir: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setattr(traces, "MOST_UNPACKED", 1_000_000)
    monkeypatch.setattr(traces, "MOST_VALUES", 300_000)
    write(rundir.trace_file(first=1, last=1, rank=0), content)
    assert guarded(["profile", "mine", "--last"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank00000.json.gz: is no trace of colotrain's" in line


def test_a_trace_is_a_file_of_the_run_with_a_trace_s_name(
    rundir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = gzip.compress(json.dumps(TRACE).encode())
    for name in ("steps-1-2-rankX.json.gz", "steps-rank1.json.gz", "steps-1-2.json.gz"):
        write(rundir.traces / name, good)
    assert guarded(["profile", "mine"]) == 2
    assert "has no traces" in capsys.readouterr().err
    path = rundir.trace_file(first=4, last=5, rank=0)
    os.mkfifo(path)
    assert guarded(["profile", "mine"]) == 2
    assert "is no regular file" in capsys.readouterr().err
    path.unlink()
    write(tmp_path / "elsewhere", good)
    path.symlink_to(tmp_path / "elsewhere")
    assert guarded(["profile", "mine"]) == 2
    assert "is a link, which is not followed" in capsys.readouterr().err


def test_the_trace_that_a_running_job_names_is_looked_for_in_the_run(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "state", lambda *_: "running")

    def answer(**_: Any) -> None:
        with EventWriter(rundir.event_file(rank=0, attempt=0)) as events:
            events.write(Traced(first=1, last=2, path="/etc/elsewhere/steps-1-2-rank0.json.gz"))

    monkeypatch.setattr(rundir, "request_profile", answer)
    found = module.ask(rundir, num_steps=1, ranks=(0,))
    assert found == [rundir.traces / "steps-1-2-rank0.json.gz"]


def test_without_traces_it_says_how_to_get_some(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["profile", "mine"]) == 2
    assert "train.profile.steps=[FIRST,LAST]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "2", "-1", "0,9"])
def test_ranks_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="expected ranks from 0 to 1"):
        module._ranks(text, 2)


def test_a_request_is_read_back_and_junk_is_none(rundir: RunDir) -> None:
    assert rundir.profile_request() is None
    rundir.request_profile(num_steps=3, ranks=[0, 1])
    assert rundir.profile_request() == (3, (0, 1))
    for junk in ("", "{", "[]", '{"num_steps": "x", "ranks": []}', '{"num_steps": 1}'):
        rundir.profile_request_file.write_text(junk)
        assert rundir.profile_request() is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.profile.steps=[3]"], "expected the first and the last step"),
        (["train.profile.steps=[0,3]"], "expected the first and the last step"),
        (["train.profile.steps=[5,3]"], "expected the first and the last step"),
        (["train.profile={steps: [1,3], ranks: [7]}"], "expected ranks from 0 to 0"),
        (["train.profile={steps: [1,3], ranks: []}"], "expected at least one rank"),
    ],
)
def test_steps_and_ranks_that_cannot_be_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(["recipe=llm-tiny", "cluster.procs_per_node=1", *words])
    assert problem in refused.value.lines()[0]


def test_a_plan_has_each_rank_once() -> None:
    plan = profile_plan(Profile(steps=[2, 4], ranks=[1, 0, 1]))
    assert plan is not None
    assert (plan.first, plan.last, plan.ranks) == (2, 4, (0, 1))
    assert profile_plan(Profile()) is None


def test_no_span_is_made_while_no_trace_is_taken() -> None:
    spans.enter_phase(Phase.DATA)
    assert isinstance(spans.span("reduce"), nullcontext)


class Sharded:
    """Stands for a `ShardedModel` of blocks without groups."""

    groups = ()

    def __init__(self) -> None:
        self.module = nn.Sequential()
        self.module.add_module("embed", nn.Linear(4, 4))
        blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.module.add_module("blocks", blocks)


def test_the_spans_of_a_step_change_no_bit_and_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    sharded, inputs = Sharded(), torch.randn(3, 4)
    model = sharded.module

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        spans.enter_phase(Phase.COMPUTE)
        loss = model(inputs).square().sum()
        spans.enter_phase(Phase.COMPUTE)  # as a heartbeat repeats it
        loss.backward()
        beat = threading.Thread(target=spans.enter_phase, args=(Phase.CHECKPOINT,))
        beat.start()
        beat.join()
        spans.enter_phase(Phase.OPTIMIZER)
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain, hooks = step(), [len(m._forward_hooks) for m in model.modules()]
    watch = spans.Spans()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        watch.install(sharded)  # type: ignore[arg-type]
        watch.begin_step(1)
        traced = step()
        watch.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    names = [e.name.removeprefix(PREFIX) for e in profiler.events() if e.name.startswith(PREFIX)]
    blocks = [f"blocks.{index}" for index in range(3)]
    assert [n for n in names if n.startswith("forward b")] == [f"forward {b}" for b in blocks]
    backwards = [n for n in names if n.startswith("backward b")]
    assert backwards == [f"backward {b}" for b in reversed(blocks)]
    work = [e.time_range.start for e in profiler.events() if e.name == "aten::mm"]
    spent = [e.time_range for e in profiler.events() if e.name.startswith(f"{PREFIX}backward b")]
    assert all(any(one.start <= at < one.end for at in work) for one in spent)
    rest = [name for name in names if " blocks" not in name]
    assert sorted(rest) == ["backward", "forward", "step 1", "update"]
    assert all(torch.equal(a, b) for a, b in zip(plain, step(), strict=True))
