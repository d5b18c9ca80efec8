"""Traces of a real run have the steps that were asked for, and change nothing that is trained."""

from __future__ import annotations

from pathlib import Path

from colotrain.events.traces import break_down, read_trace
from tests.running import SMALL, Colotrain, losses, wait_for_step

SHORT = (*SMALL, "train.max_steps=6", "train.eval_steps=0", "checkpoint.every=5")


def test_planned_traces_have_their_steps_and_losses_are_the_same(tmp_path: Path) -> None:
    colotrain = Colotrain(tmp_path)
    plain = colotrain.run(*SHORT, "plugin=zero3", "name=plain")
    traced = colotrain.run(
        *SHORT, "plugin=zero3", "name=traced", "train.profile={steps: [4, 5], ranks: [0, 1]}"
    )
    assert losses(traced) == losses(plain)
    rundir = colotrain.rundir("traced")
    for rank in (0, 1):
        found = break_down(read_trace(rundir.trace_file(first=4, last=5, rank=rank)))
        assert found.steps == (4, 5)
        assert set(found.blocks) >= {"blocks.0", "blocks.1", "blocks.2"}
        assert {"forward", "backward"} <= set(found.blocks["blocks.1"])
        parts = {"data", "forward", "backward", "reduce", "wait", "update", "checkpoint"}
        assert parts <= set(found.parts)
        steps = [e for e in colotrain.events("traced") if e.kind == "step" and e.rank == rank]
        measured = [e.fields["step_s"] for e in steps if e.fields["step"] in (4, 5)]
        assert found.step_s >= 0.9 * sum(measured) / 2  # with the checkpoint after step 5
    assert sorted(path.name for path in rundir.traces.iterdir()) == [
        f"steps-00000004-00000005-rank0000{rank}.json.gz" for rank in (0, 1)
    ]
    shown = colotrain("profile", "traced")
    assert shown.code == 0, shown.err
    assert "rank 1, steps 4 to 5" in shown.out


def test_a_running_job_is_traced_when_asked(tmp_path: Path) -> None:
    colotrain = Colotrain(tmp_path)
    run = colotrain.start(
        "run", *SMALL, "name=live", "train.max_steps=100000", "checkpoint.every=0"
    )
    try:
        wait_for_step(colotrain, "live", 2)
        shown = colotrain("profile", "live", "--steps", "2", "--ranks", "1", "--json")
        assert shown.code == 0, shown.err
        (trace,) = shown.json["traces"]
        assert trace["path"].endswith("rank00001.json.gz")
        assert len(trace["steps"]) == 2
        assert not colotrain.rundir("live").profile_request_file.exists()
        again = colotrain("profile", "live", "--steps", "1", "--json")
        assert again.code == 0, again.err
        assert again.json["traces"][0]["steps"][0] > trace["steps"][-1]
    finally:
        colotrain("stop", "live")
        run.communicate(timeout=120)
