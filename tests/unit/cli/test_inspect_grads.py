"""inspect-grads: what a run or one step of a plan says about every parameter's gradient."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.inspect_grads import ask, for_one_step
from colotrain.cli.main import guarded
from colotrain.errors import ColotrainError, UsageError
from colotrain.events import liveness
from colotrain.events.log import EventWriter
from colotrain.events.view import ENDED
from colotrain.rundir import RunDir
from tests.unit.events.test_view import launcher, plan_of, worker, write_files
from tests.unit.generated import NAMES, STATUSES, gradients, parameters
from tests.unit.show.test_dashboard import CONTROL


def make(name: str, *, scale: float = 1.0) -> RunDir:
    rundir = RunDir(Path("runs") / name)
    rundir.create()
    rundir.write_plan(plan_of(max_steps=30))
    events = [worker("started", 100, step=0), parameters()]
    events += [gradients(n, scale=scale) for n in (10, 20)]
    done = [launcher("launch", 1.0), launcher("done", 200.0, status="finished", exit_code=0)]
    write_files(rundir, [done, events])
    return rundir


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return make("tiny")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert guarded(["inspect-grads", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_document_is_the_one_of_the_design(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys)
    keys = "run step global_norm clipped_to parameters first_nonfinite"
    assert list(found) == keys.split()
    assert (found["run"], found["step"], found["clipped_to"]) == ("tiny", 20, 1.0)
    assert found["first_nonfinite"] is None
    assert found["parameters"][1] == {
        "name": "blocks.0.attention.weight",
        "shape": [4, 8],
        "dtype": "float32",
        "status": "trained",
        "reason": None,
        "norm": 2 / 20,
        "rms": 2 / 20 / 4,
        "max_abs": 2 / 20 / 2,
        "zero_fraction": 0.0,
        "nonfinite": 0,
        "update_ratio": 2 / 20 / 100,
        "aliases": [],
    }
    assert [row["name"] for row in found["parameters"]] == NAMES
    assert {row["name"]: row["status"] for row in found["parameters"]} == STATUSES


def test_where_numbers_stopped_being_finite_is_in_the_document(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"parameter": "head.weight", "module": "head", "rank": 1, "step": 20}
    where |= {"micro_batch": 3, "phase": "backward"}
    with EventWriter(rundir.event_file(rank=0, attempt=0)) as events:
        events.write_record("nonfinite", t=130.0, samples=[1, 2], **where)
    assert document(capsys)["first_nonfinite"] == where
    assert guarded(["inspect-grads"]) == 0
    told = capsys.readouterr().out
    assert "first not finite: head in backward of step 20, rank 1, micro-batch 3" in told


def test_a_step_can_be_chosen(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "tiny", "--step", "10")["step"] == 10
    assert guarded(["inspect-grads", "tiny", "--step", "11"]) == 2
    assert "no record of step 11; near it are 10, 20" in capsys.readouterr().err


def names(found: dict[str, Any]) -> list[str]:
    return [row["name"] for row in found["parameters"]]


def test_rows_are_chosen_and_sorted(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(document(capsys, "--param", "blocks.1.*")) == [NAMES[3], NAMES[4]]
    assert names(document(capsys, "--param", "tied*")) == ["embed.weight"]  # by its other name
    assert names(document(capsys, "--sort", "name")) == sorted(NAMES)
    largest = names(document(capsys, "--sort", "norm", "--top", "3"))
    assert largest == [NAMES[3], NAMES[4], NAMES[2]]  # what is no number comes first
    assert names(document(capsys, "--sort", "zero", "--top", "1")) == ["embed.weight"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--param", "bloks.1*"], "--param bloks.1*: no parameter has such a name"),
        (["--sort", "nrom"], "expected one of norm, update, zero, name; did you mean norm"),
        (["tiny", "other"], "expected one run; compare two with --against RUN"),
        (["nothing"], "no run 'nothing'"),
        (["--live"], "not running (finished)"),
        (["recipe=llm-tiny", "--against", "tiny"], "expected two runs that were made"),
        (["recipe=llm-tiny", "--step", "0"], "--step: cannot be had beside KEY=VALUE"),
        (["recipe=llm-tiny", "--live"], "--live: cannot be had beside KEY=VALUE"),
        (["--live", "--step", "10"], "--step: cannot be had beside --live"),
        (["--against", "tiny", "--csv", "a", "--top", "1"], "--top, --csv: cannot be had beside"),
        (["--tolerance", "0.1"], "--tolerance: expected --against RUN beside it"),
        (["--csv", "missing/x.csv"], "missing/x.csv: cannot be written"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    rundir: RunDir, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert guarded(["inspect-grads", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_run_without_records_says_how_to_get_one(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.event_file(rank=0, attempt=0).unlink()
    assert guarded(["inspect-grads"]) == 2
    said = capsys.readouterr().err
    assert "tiny (finished): has no gradient records; set observe.grads_every" in said
    assert "wait" not in said


@pytest.mark.parametrize("status", [*ENDED, "dead"])
def test_nobody_is_told_to_wait_for_a_run_that_has_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = RunDir(Path("runs") / "over")
    rundir.create()
    rundir.write_plan(plan_of())
    done = [launcher("done", 2.0, status=status, exit_code=1)] if status in ENDED else []
    write_files(rundir, [[launcher("launch", 1.0), *done], [worker("started", 1.5, step=0)]])
    rundir.launcher_file.write_text("{}")
    assert guarded(["inspect-grads", "over"]) == 2
    said = capsys.readouterr().err
    assert f"over ({status}): has no gradient records" in said
    assert not re.search(r"\bwait\b|--live", said)


def test_the_table_is_a_line_per_parameter(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["inspect-grads"]) == 0
    text = capsys.readouterr().out
    assert not CONTROL.search(text)
    lines = text.splitlines()
    assert lines[0] == "step 20: gradient norm 2.5, clipped to 1"
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == NAMES
    assert "no path from the loss" in rows["head.weight"]
    assert "embed*; tied to tied.weight" in rows["embed.weight"]
    assert "its norm is nan; 32 elements are not finite" in rows["blocks.1.attention.weight"]


def test_a_file_of_comma_separated_values(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["inspect-grads", "--csv", "grads.csv"]) == 0
    assert capsys.readouterr().out == ""
    with Path("grads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == NAMES
    assert (rows[0]["shape"], rows[0]["aliases"]) == ("4x8", "tied.weight")
    assert float(rows[1]["norm"]) == 0.1
    assert math.isnan(float(rows[3]["norm"]))


def test_two_runs_are_compared(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    make("other", scale=1.5)
    make("same")
    assert guarded(["inspect-grads", "tiny", "--against", "same"]) == 0
    told = capsys.readouterr().out
    assert told == "tiny and same: no difference above 1e-05 in 0 losses and 2 gradient records\n"
    assert guarded(["inspect-grads", "tiny", "--against", "other"]) == 4
    assert capsys.readouterr().out == (
        "step 10: norm of blocks.0.attention.weight: tiny 0.2, other 0.3 (3 parameters differ)\n"
    )
    assert guarded(["inspect-grads", "tiny", "--against", "other", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["gradient"]["parameter"] == "blocks.0.attention.weight"
    assert found["gradient"]["values"] == [0.2, pytest.approx(0.3)]
    wide = ["inspect-grads", "tiny", "--against", "other", "--tolerance", "0.5", "--json"]
    assert guarded(wide) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_a_comparison_says_in_which_settings_the_runs_differ(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, lr in ((rundir, 0.125), (make("other"), 0.25)):
        run.config_file.write_text(json.dumps({"optim": {"lr": lr}}))
    assert guarded(["inspect-grads", "tiny", "--against", "other"]) == 0
    said = capsys.readouterr().out
    assert "settings that differ: tiny: optim.lr=0.125" in said
    assert "settings that differ: other: optim.lr=0.25" in said


SCRIPT = """
for other in same other missing; do
    colotrain inspect-grads tiny --against $other >/dev/null 2>&1
    case $? in 0) echo "$other: same" ;; 4) echo "$other: differs" ;; *) echo "$other: $?" ;; esac
done
if colotrain inspect-grads tiny --against other >/dev/null; then echo same; else echo differs; fi
"""


def test_a_shell_script_learns_from_the_exit_code_whether_runs_differ(rundir: RunDir) -> None:
    make("other", scale=1.5)
    make("same")
    bin_folder = Path("bin")
    bin_folder.mkdir()
    program = bin_folder / "colotrain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m colotrain "$@"\n')
    program.chmod(0o755)
    path = f"{bin_folder.absolute()}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", SCRIPT], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["same: same", "other: differs", "missing: 2", "differs"]


@pytest.fixture
def running(rundir: RunDir) -> RunDir:
    """The same, launched again by this process."""
    with EventWriter(rundir.launcher_events) as events:
        events.write_record("launch", world_size=2)
    return rundir


def test_a_running_job_is_asked_and_answers(running: RunDir) -> None:
    def answer() -> None:
        while not running.grads_request_file.exists():
            time.sleep(0.01)
        running.grads_request_file.unlink()
        event = gradients(21, t=time.time())
        with EventWriter(running.event_file(rank=0, attempt=0)) as events:
            events.write_record("gradients", t=event.t, **event.fields)

    with liveness.claim(running):
        job = threading.Thread(target=answer)
        job.start()
        record = ask(running, timeout_s=30)
        job.join()
    assert record.step == 21
    assert [row.name for row in record.parameters] == NAMES


def test_the_wait_for_an_answer_is_bounded(running: RunDir) -> None:
    with liveness.claim(running), pytest.raises(ColotrainError, match="no record after 0 s"):
        ask(running, timeout_s=0.2)


def test_a_run_that_is_dead_is_not_asked(running: RunDir) -> None:
    running.launcher_file.write_text("{}")
    with pytest.raises(UsageError, match=r"not running \(dead\)"):
        ask(running, timeout_s=30)
    assert not running.grads_request_file.exists()


def test_one_step_of_a_plan_is_recorded_and_leaves_out_the_rest() -> None:
    plan = for_one_step(plan_of(max_steps=500))
    assert (plan.train.max_steps, plan.train.eval_steps, plan.observe.grads_every) == (1, 0, 1)
    assert not plan.checkpoint.enabled
    assert plan.batch == plan_of().batch
    assert plan.optim == plan_of().optim
