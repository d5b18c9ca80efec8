"""A run directory from elsewhere runs no code that it names, unless the user says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.errors import UsageError
from colotrain.rundir import RunDir
from colotrain.runs import trust
from colotrain.runs.resolving import resolve_config
from colotrain.runs.trust import write_signed

TARGETS = (
    "model.target=tests.dist.difficult:make",
    "model.args.name=Stack",
    "data.target=tests.dist.difficult:samples",
    "train.global_batch=4",
    "cluster.procs_per_node=1",
)
EVIL = {"target": "os:system", "args": {"command": "touch touched"}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rundir(home: Path) -> RunDir:
    """A run of this user's own."""
    resolved = resolve_config([*TARGETS, "name=mine"])
    rundir = RunDir(home / "runs" / "mine")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    return rundir


def test_ones_own_run_is_trusted_wherever_it_is_moved(rundir: RunDir, home: Path) -> None:
    assert trust.key_file().stat().st_mode & 0o777 == 0o600
    moved = RunDir(shutil.move(rundir.path, home / "runs" / "moved"))
    trust.check(moved, moved.plan(), trusted=False)
    trust.check_config(moved, trusted=False)


def test_what_another_user_wrote_is_refused_also_under_runs(
    rundir: RunDir, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    for trusted_key in (False, True):  # without a key, and with one of the user's own
        if trusted_key:
            trust.sign(RunDir(home), rundir.plan())
        with pytest.raises(UsageError, match=r"data\.target=tests\.dist\.difficult:samples"):
            trust.check(rundir, rundir.plan(), trusted=False)
        with pytest.raises(UsageError, match="--trust-code"):
            trust.check_config(rundir, trusted=False)
    trust.check(rundir, rundir.plan(), trusted=True)
    trust.check_config(rundir, trusted=True)
    named = {"model.target", "data.target"}
    trust.check_config(rundir, trusted=False, given=named)


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "mine"],
        ["resume", "mine", "train.max_steps=3"],
        ["resume", "mine", "data.target=tests.dist.difficult:samples"],
        ["export", "mine", "--to", "out"],
        ["node", "runs/mine"],
    ],
)
def test_no_verb_runs_what_was_changed_in_a_run_directory(
    rundir: RunDir, home: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (rundir.plan_file, rundir.config_file):
        document = json.loads(file.read_text())
        document["model"] |= EVIL
        file.write_text(json.dumps(document))
    assert guarded(words) == 2
    assert "model.target=os:system" in capsys.readouterr().err
    assert not (home / "touched").exists()


@pytest.mark.parametrize(
    "text", ["defaults: [x]", '{"defaults": ["x"]}', '{"model": "${oc.env:A}"}']
)
def test_a_configuration_that_is_not_as_written_is_refused(rundir: RunDir, text: str) -> None:
    rundir.config_file.write_text(text)
    with pytest.raises(UsageError, match="names code"):
        trust.check_config(rundir, trusted=False)


def test_a_run_that_names_no_code_needs_no_signature(home: Path) -> None:
    resolved = resolve_config(["recipe=llm-tiny", "name=plain"])
    rundir = RunDir(home / "plain")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    rundir.signature_file.unlink()
    trust.check(rundir, rundir.plan(), trusted=False)
    trust.check_config(rundir, trusted=False)


def test_a_key_that_others_can_read_signs_nothing(rundir: RunDir) -> None:
    trust.key_file().chmod(0o644)
    with pytest.raises(UsageError):
        trust.check(rundir, rundir.plan(), trusted=False)
