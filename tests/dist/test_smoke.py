"""`run --smoke`: all of a plan in two steps, the second resumed from a checkpoint."""

from __future__ import annotations

import json

from colotrain.events.gradients import records
from colotrain.rundir import RunDir
from tests.running import SMALL, Colotrain


def test_everything_of_a_plan_runs_and_the_second_step_is_resumed(colotrain: Colotrain) -> None:
    later = ("freeze.patterns=[blocks.0.*]", "freeze.unfreeze={500:[blocks.0.*]}")
    result = colotrain(
        *("run", *SMALL, "plugin=gemini", "name=real", "train.max_steps=1000", *later),
        *("--smoke", "--json"),
    )
    assert result.code == 0, result.err
    summary = result.json
    rundir = RunDir(summary["run_dir"])
    events = colotrain.events(rundir.name)
    kinds = [event.kind for event in events if event.rank in (None, 0)]
    assert kinds.count("launch") == 2
    assert [e.fields["step"] for e in events if e.kind == "resumed"] == [1]
    assert [e.fields["step"] for e in events if e.kind == "checkpoint"] == [1]
    steps = [e for e in events if e.kind == "step" and e.rank == 0]
    assert [e.fields["step"] for e in steps] == [1, 2]
    assert {e.kind for e in events} >= {"eval", "gradients"}
    assert summary["smoke"]["passed"]
    assert summary["smoke"]["resumed_from_step"] == 1
    assert (summary["steps"], summary["micro_batches"], summary["plugin"]) == (2, 4, "gemini")
    assert json.loads(rundir.summary_file.read_text())["smoke"]["checkpoint_bytes"] > 0
    assert not list(rundir.checkpoints.iterdir())
    assert not colotrain.rundir("real").path.exists()
    (line,) = [line for line in result.err.splitlines() if line.startswith("smoke run")]
    assert line.startswith("smoke run passed in")
    assert "gemini on 2 cpu ranks, 2 steps of 2 micro-batches" in line
    status = [{p.status for p in r.parameters if "blocks.0." in p.name} for r in records(rundir)]
    assert status == [{"frozen"}, {"trained"}]
