"""The file of a run's job goes into commands of schedulers: only this user's own is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.schedulers.hosts import Hosts
from colotrain.schedulers.job import Submitted
from colotrain.schedulers.registry import SCHEDULERS, job_logs, recall, remember

COMMANDS = ("scancel", "squeue", "scontrol", "sacct", "ssh", "kubectl", "sky", "dstack")
IDS = {
    "slurm": "77_3",
    "hosts": "20260101-120000-1a2b",
    "kubernetes": "far-1a2b3c4d",
    "skypilot": "far-1a2b3c4d",
    "dstack": "far-1a2b3c4d",
}
"""Scheduler → an id that it gives."""
EVIL = (
    "--user=root",
    "-u root",
    "--all",
    "1; touch touched",
    "$(touch touched)",
    "20260101-120000-1a2b*) ;; esac; touch touched; case x in *",
    "../../7",
    "7\n8",
    "",
    "far,app!=x",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose stand-ins for schedulers' commands write down that they were called."""
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rundir_of(here: Path, name: str = "mine") -> RunDir:
    rundir = RunDir(here / "runs" / name)
    rundir.create()
    rundir.plan_file.write_text("{}")
    return rundir


def job(scheduler: str, number: str, **more: Any) -> Submitted:
    settings: dict[str, Any] = {"names": ["node-a"]} if scheduler == "hosts" else {}
    settings = to_plain(SCHEDULERS[scheduler].settings(**settings)) | more.pop("settings", {})
    return Submitted(job=number, script="x", scheduler=scheduler, settings=settings, **more)


@pytest.mark.parametrize("scheduler", IDS)
def test_no_verb_follows_a_job_of_somebody_else(
    here: Path, scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = rundir_of(here)
    rundir.job_file.write_text(json.dumps(to_plain(job(scheduler, IDS[scheduler]))))
    for words in (["runs"], ["stop", "mine"], ["logs", "mine"], ["runs", "--json"]):
        guarded(words)
    assert "not written by you" in capsys.readouterr().err
    assert not (here / "called").exists()


@pytest.mark.parametrize("scheduler", IDS)
@pytest.mark.parametrize("number", EVIL)
def test_an_id_that_its_scheduler_does_not_give_is_none(
    here: Path, scheduler: str, number: str
) -> None:
    rundir = rundir_of(here)
    remember(rundir, job(scheduler, number))
    assert recall(rundir) is None
    remember(rundir, job(scheduler, IDS[scheduler]))
    assert recall(rundir) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"scheduler": "cron"},
        {"sweep": "../../elsewhere"},
        {"settings": {"names": ["-oProxyCommand=touch touched"]}},
        {"settings": {"names": ["a b"], "unknown": 1}},
        {"settings": []},
        {"job": 7},
    ],
)
def test_a_signed_job_is_checked_as_well(here: Path, changed: dict[str, Any]) -> None:
    rundir = rundir_of(here)
    known = to_plain(job("hosts", IDS["hosts"])) | changed
    rundir.job_file.write_text(json.dumps(known))
    from colotrain import signatures

    signatures.sign(rundir, {"job": [rundir.name, known]})
    assert recall(rundir) is None
    assert job_logs(rundir) == []


def test_a_job_belongs_to_its_run_and_is_as_it_was_written(here: Path) -> None:
    own, other = rundir_of(here), rundir_of(here, "other")
    remember(own, job("slurm", "77"))
    for name in ("job.json", "signature.json"):
        (other.path / name).write_bytes((own.path / name).read_bytes())
    assert recall(other) is None
    own.job_file.write_text(own.job_file.read_text().replace("77", "78"))
    assert recall(own) is None
    own.job_file.write_text("[" * 100_000)
    assert recall(own) is None


def test_a_script_is_the_one_in_the_folder_of_the_run_or_its_sweep(here: Path) -> None:
    own = rundir_of(here)
    remember(own, job("slurm", "77_0", sweep="many"))
    known = recall(own)
    assert known is not None
    assert known.script == str(here / "runs" / "many" / "job.sbatch")
    remember(own, job("hosts", IDS["hosts"]))
    known = recall(own)
    assert known is not None
    assert known.script == str(own.path / "job.sh")
    assert known.section(Hosts).names == ["node-a"]
