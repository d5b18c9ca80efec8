"""Whoever uses a plan uses the one that was checked, also where somebody else writes another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.cli.main import guarded
from colotrain.errors import UsageError
from colotrain.export import write
from colotrain.launch.rendezvous import Node, Rendezvous
from colotrain.launch.server.forkserver import ENTRY, work
from colotrain.rundir import RunDir
from colotrain.runs import detach, start, trust
from colotrain.runs.resolving import resolve_config
from colotrain.spec.exit_codes import WORKER_USAGE
from colotrain.spec.plan import RunPlan
from colotrain.verify import runner, worker

CHANGED = "plan.json: was changed after it was checked"
OWN = (
    "model.target=tests.dist.difficult:make",
    "model.args.name=Stack",
    "data.target=tests.dist.difficult:samples",
    "train.global_batch=4",
    "cluster.procs_per_node=1",
    "name=mine",
)


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of this user's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    resolved = resolve_config(OWN)
    rundir = RunDir(tmp_path / "runs" / "mine")
    rundir.create()
    trust.write_signed(resolved.plan, rundir, resolved.config)
    return rundir


def swap(rundir: RunDir) -> None:
    """Write another plan, as somebody else could who can write to the run directory."""
    plan = rundir.plan()
    args = {"command": "touch touched"}
    rundir.write_plan(replace(plan, model=replace(plan.model, target="os:system", args=args)))


def then_swapped(function: Callable[..., Any], rundir: RunDir) -> Callable[..., Any]:
    def called(*given: Any, **options: Any) -> Any:
        result = function(*given, **options)
        swap(rundir)
        return result

    return called


def test_a_plan_is_read_by_its_digest(rundir: RunDir) -> None:
    plan = rundir.plan()
    assert rundir.plan(plan.digest) == plan
    assert plan.digest == resolve_config(OWN).plan.digest
    swap(rundir)
    with pytest.raises(UsageError, match=CHANGED):
        rundir.plan(plan.digest)


def test_a_rank_of_another_plan_ends_with_one_line(rundir: RunDir, tmp_path: Path) -> None:
    digest, log = rundir.plan().digest, tmp_path / "log"
    swap(rundir)
    if not (child := os.fork()):
        sys.stderr = log.open("w")
        os.environ["GROUP_WORLD_SIZE"] = "1"
        work(ENTRY, str(rundir.path), os.getppid(), "", "", (digest,), {})
    _, status = os.waitpid(child, 0)
    (line,) = log.read_text().splitlines()
    assert line.startswith(f"error: {rundir.path}/{CHANGED}")
    assert os.waitstatus_to_exitcode(status) == WORKER_USAGE


def test_ranks_get_the_digest_of_their_launcher_s_plan(rundir: RunDir) -> None:
    plan = rundir.plan()
    swap(rundir)
    files: Any = None
    rendezvous = Rendezvous(
        plan, rundir, Node(), files=files, stop=lambda: False, say=lambda text: None
    )
    rendezvous.begin(rendezvous.membership.next_round(timeout_s=5))
    assert rendezvous.plan_digest == plan.digest


def test_a_case_of_verify_is_the_one_that_was_written(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(plan: RunPlan, run: RunDir, **options: Any) -> tuple[int, str]:
        swap(runner.case_in(run, 1))
        return worker.main(str(run.path), plan.digest, *options["case_digests"]), ""

    class Process:
        """Stands in for a process group."""

        @staticmethod
        def get_rank() -> int:
            return 0

    trained = []
    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(worker, "StopRequest", lambda rundir: None)
    monkeypatch.setattr(worker, "connect", lambda plan: torch.device("cpu"))
    monkeypatch.setattr(worker, "dist", Process)
    monkeypatch.setattr(worker, "train_case", lambda plan, *_: trained.append(plan))
    plan = rundir.plan()
    with pytest.raises(UsageError, match=f"0001/{CHANGED}"):
        list(runner.verify([plan, plan], tmp_path / "cases"))
    assert [case.model for case in trained] == [plan.model]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_detached_launcher_trains_the_plan_it_was_started_for(
    rundir: RunDir, swapped: bool, monkeypatch: Any, capsys: Any
) -> None:
    words, trained, plan = list[str](), list[RunPlan](), rundir.plan()
    monkeypatch.setattr("subprocess.Popen", lambda given, **_: words.extend(given))
    detach.start(plan, rundir)
    monkeypatch.undo()
    monkeypatch.setattr(start, "train", lambda plan, *_, **__: trained.append(plan) or 0)
    rundir.signature_file.unlink()  # as where the home is another
    if swapped:
        swap(rundir)
    code = guarded(words[words.index("colotrain") + 1 :])
    assert (code, trained) == ((2, []) if swapped else (0, [plan]))
    assert (CHANGED in capsys.readouterr().err) is swapped


def test_an_export_is_of_the_plan_that_was_checked(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(trust, "check", then_swapped(trust.check, rundir))
    monkeypatch.setattr(write, "choose", lambda rundir, step: rundir.checkpoint(1))
    monkeypatch.setattr(write, "CheckpointTensors", lambda folder: None)
    monkeypatch.setattr(write, "step_of", lambda folder: 1)
    for form in write.WRITERS:
        monkeypatch.setitem(write.WRITERS, form, lambda job: written.append(job.plan) or [])
    plan = rundir.plan()
    assert guarded(["export", "mine", "--to", "out"]) == 0
    assert written == [plan]
    assert not (tmp_path / "touched").exists()


def test_resume_with_settings_composes_the_configuration_that_it_checked(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    signed, read = rundir.config_file.read_text(), trust.read_config

    def then_restored(rundir: RunDir) -> dict[str, Any]:
        found = read(rundir)
        rundir.config_file.write_text(signed)
        return found

    rundir.config_file.write_text(signed.replace("tests.dist.difficult:make", "os:system"))
    monkeypatch.setattr(trust, "read_config", then_restored)
    assert guarded(["resume", "mine", "train.max_steps=3"]) == 2
    assert "was not written by you" in capsys.readouterr().err
