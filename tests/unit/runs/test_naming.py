"""A name stands for one run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.engine.state.manifest import Manifest, write_manifest
from colotrain.errors import UsageError
from colotrain.events import liveness
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.runs import naming
from colotrain.runs.resolving import ResolvedConfig, resolve_config
from colotrain.runs.sweep import Element, table
from colotrain.runs.trust import write_signed
from colotrain.schedulers import slurm_queue as queue
from colotrain.schedulers.job import Answers, JobState, Submitted
from colotrain.schedulers.registry import remember
from tests.running import SMALL

X = (*SMALL, "name=x", "plugin=zero2")


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(*overrides: str, status: str | None = "finished", steps: int = 200) -> RunDir:
    """A run with a checkpoint, as one that was trained before leaves it."""
    resolved, rundir = resolve_config([*X, *overrides]), RunDir("runs/x")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    rundir.checkpoint(steps).mkdir(exist_ok=True)
    if status:
        memory: Any = {"peak_by_rank": [1], "predicted_peak": 1, "error": None}
        loss = {"first": 2.0, "last": 1.0, "history": []}
        rundir.write_summary(
            {"status": status, "steps": steps, "memory": memory, "loss": loss, "tokens_per_s": 1.0}
            | {"mfu": 0.0, "restarts": 0, "time_to_first_step_s": 1.0, "run_dir": str(rundir.path)}
        )
    return rundir


def check(resolved: ResolvedConfig, **how: bool) -> None:
    naming.check_name(RunDir("runs/x"), resolved.plan, resolved.config, **how)


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_name_that_has_other_settings_is_refused_with_those_that_differ(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = made()
    before = {p: p.read_bytes() for p in rundir.path.iterdir() if p.is_file()}
    monkeypatch.setattr(queue, "test", lambda *script: "fine")
    assert guarded([verb, *X, "optim.lr=0.5", "+model.args.tie_embeddings=true"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert "name=x: that run was made with other settings: " in line
    assert "model.args.tie_embeddings=null, not True" in line
    assert "optim.lr=0.003, not 0.5" in line
    for choice in ("another name", "colotrain resume x KEY=VALUE", "--overwrite"):
        assert choice in line
    assert {p: p.read_bytes() for p in rundir.path.iterdir() if p.is_file()} == before


def test_a_job_with_other_settings_is_gone_on_with_as_a_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remember(made(), Submitted(job="7", script="x"))
    assert guarded(["run", *X, "optim.lr=0.5"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert "choose another name, or one with checkpoint.resume=runs/x to go on with" in line
    assert "colotrain resume" not in line


def test_two_names_that_become_one_folder_are_not_one_run() -> None:
    resolved, rundir = resolve_config([*X, 'name="größe 1"']), RunDir("runs/gr-e-1")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    rundir.checkpoint(1).mkdir()
    naming.check_name(rundir, resolved.plan, resolved.config)
    assert RunDir.find("größe 1").path == RunDir.find("gr-e-1").path == rundir.path
    other = resolve_config([*X, 'name="grüße 1"'])
    with pytest.raises(UsageError, match=r"name=grüße 1: its folder .* that of the run größe 1"):
        naming.check_name(RunDir("runs/gr-e-1"), other.plan, other.config)


def test_the_same_settings_in_another_spelling_go_on() -> None:
    made("optim.lr=0.5", status=None)
    check(
        resolve_config(
            [*X, "optim.lr=5e-1", "cluster.rdzv_endpoint='host:1'", "checkpoint.resume=auto"]
        )
    )
    with pytest.raises(UsageError, match=r"optim\.lr=0\.5, not 0\.25"):
        check(resolve_config([*X, "optim.lr=0.25"]))
    Path("runs/x/config.yaml").write_text(json.dumps({"optim": {"lr": 0.5}}))
    with pytest.raises(UsageError, match="more keys"):  # all else was the default there
        check(resolve_config([*X, "optim.lr=0.5"]))


def test_a_run_of_which_there_is_nothing_gives_its_name_away() -> None:
    rundir = made(status=None)
    rundir.checkpoint(200).rmdir()
    check(resolve_config([*X, "optim.lr=0.5"]))
    remember(rundir, Submitted(job="7", script="x"))
    with pytest.raises(UsageError, match="other settings"):  # a job has it
        check(resolve_config([*X, "optim.lr=0.5"]))


def test_what_has_finished_says_so_and_is_left_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rundir = made()
    before = rundir.plan_file.stat().st_mtime_ns
    assert guarded(["run", *X, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["run_dir"] == str(rundir.path)
    assert "x has finished its 200 steps already, with these settings" in printed.err
    assert "colotrain resume x train.max_steps=N" in printed.err
    assert rundir.plan_file.stat().st_mtime_ns == before
    for state in ("failed", "preempted"):
        made(status=state)
        assert naming.finished(rundir, rundir.plan()) is None


def test_overwrite_sets_the_old_run_aside_with_all_that_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made()
    check(resolve_config([*X, "optim.lr=0.5"]), overwrite=True)
    assert not Path("runs/x").exists()
    (old,) = Path("runs").iterdir()
    assert old.name.startswith("x.old-2")
    assert RunDir(old).plan().name == "x"
    assert (old / "checkpoints" / "step-00000200").is_dir()
    assert liveness.launcher_of(RunDir(old)) is None
    assert f"the run that was called x is {old.name} now" in capsys.readouterr().err
    assert RunDir.find(old.name).path == old.absolute()


def test_a_run_that_somebody_has_is_not_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = made()
    with liveness.claim(rundir):
        holder = json.loads(rundir.launcher_file.read_text())
        start = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        other = holder | {"pid": os.getppid(), "start_time": start}
        rundir.launcher_file.write_text(json.dumps(other))
        with pytest.raises(UsageError, match="launches this run already"):
            naming.set_aside(rundir)
    rundir.launcher_file.unlink()
    remember(rundir, Submitted(job="7", script="x"))
    answers = Answers(states={"7": JobState(state="PENDING")})
    monkeypatch.setattr(queue, "ask", lambda jobs: answers)
    with pytest.raises(UsageError, match="job 7 has this run"):
        naming.set_aside(rundir)
    assert rundir.path.is_dir()


def test_a_run_is_not_set_aside_where_the_checkpoint_it_would_resume_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rundir, elsewhere = made(), RunDir("runs/elsewhere").checkpoint(200)
    elsewhere.mkdir(parents=True)
    Path("runs/empty").mkdir()
    batch = resolve_config(X).plan.batch.global_batch
    how = {"loss_scale": None, "clean_steps": 0, "world_size": 2, "plugin": "zero2", "files": {}}
    done = {"step": 200, "optimizer_steps": 200, "micro_batches": 400, "global_batch": batch}
    write_manifest(elsewhere, Manifest(written_at=1e9, **how, **done))  # type: ignore[arg-type]
    for resume, said in (
        ("runs/elsewhere", "train.max_steps=3: expected at least 200, the steps that "),
        ("runs/x", "runs/x: --overwrite renames "),
        ("runs/empty", "runs/empty: holds no complete checkpoint"),
    ):
        words = [*X, "train.max_steps=3", f"checkpoint.resume={resume}", "--overwrite"]
        assert guarded(["run", *words]) == 2
        assert said in capsys.readouterr().err
        assert rundir.checkpoint(200).is_dir()
        assert {path.name for path in Path("runs").iterdir()} == {"x", "elsewhere", "empty"}


def test_nodes_that_are_started_by_hand_cannot_set_a_run_aside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = ("cluster.nodes=2", "cluster.node_rank=0", "cluster.rdzv_endpoint='127.0.0.1:29511'")
    assert guarded(["run", *X, *nodes, "--overwrite"]) == 2
    assert "--overwrite: expected a run on one node" in capsys.readouterr().err


def test_runs_and_pictures_say_in_which_settings_runs_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, lr in (("x", 0.1), ("y", 0.5)):
        resolved, rundir = (
            resolve_config([*X, f"name={name}", f"optim.lr={lr}"]),
            RunDir(f"runs/{name}"),
        )
        rundir.create()
        write_signed(resolved.plan, rundir, resolved.config)
        with EventWriter(rundir.event_file(rank=0, attempt=0)) as events:
            events.write_record("step", step=1, loss=2.0, tokens_per_s=7.0)
            events.write_record("eval", step=1, loss=3.0 - lr)
    assert guarded(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [rows[n]["settings"] for n in "xy"] == [{"optim.lr": 0.1}, {"optim.lr": 0.5}]
    assert [rows[n]["validation_loss"] for n in "xy"] == [2.9, 2.5]
    assert guarded(["runs"]) == 0
    assert "optim.lr=0.5" in capsys.readouterr().out
    assert guarded(["inspect-grads", "x", "--against", "y"]) == 0
    told = "settings that differ: x: optim.lr=0.1\nsettings that differ: y: optim.lr=0.5\n"
    assert told in capsys.readouterr().out
    elements = [Element(sweep="s", run=n, overrides=[], chosen={}) for n in "xy"]
    assert [row["run"] for row in table(elements)] == ["y", "x"]  # by validation loss
    pytest.importorskip("matplotlib")
    assert guarded(["plot", "x", "y", "--to", "both.svg"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == told.splitlines()
    assert Path("both.svg").is_file()
