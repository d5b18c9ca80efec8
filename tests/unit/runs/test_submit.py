"""What `submit`, `runs` and sweeps do with what SLURM's commands say."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.config.compose import combinations
from colotrain.errors import ConfigError, UsageError
from colotrain.events import liveness
from colotrain.rundir import RunDir
from colotrain.runs.submit import copy_tracked_files
from colotrain.runs.sweep import elements_of
from colotrain.schedulers import slurm_queue as queue
from colotrain.schedulers.job import JobState, Submitted
from colotrain.schedulers.registry import recall
from colotrain.schedulers.slurm_queue import asked_gpus
from colotrain.schedulers.slurm_settings import Slurm
from colotrain.show.logs import Lines, Source

TINY = ("recipe=llm-tiny", "plugin=zero2", "cluster=slurm", "cluster.procs_per_node=1")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stand in for SLURM's; the current folder is beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    (folder / "sleep").symlink_to("/bin/sleep")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    put(folder, "sbatch", "exit 1")
    for name in ("squeue", "scontrol", "sacct", "scancel", "sinfo"):
        put(folder, name, "exit 1")
    return folder


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_dry_run_needs_no_slurm_and_leaves_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in slurm.iterdir():
        command.unlink()
    assert guarded(["submit", *TINY, "name=dry", "cluster.slurm.account=a", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --account=a\n" in script
    assert "runs=(" in script
    assert not Path("runs").exists()


def test_a_dry_run_is_a_document_where_one_was_asked_for(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["name=dry"], ["name=dry", "--sweep", "train.seed=1,2"]):
        assert guarded(["submit", *TINY, *words, "--dry-run"]) == 0
        script = capsys.readouterr().out
        assert guarded(["submit", *TINY, *words, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["script_text"] == script


@pytest.mark.parametrize("key", ["time=60,120", "partition=a,b", "gpus_per_node=1,2"])
def test_the_runs_of_an_array_ask_slurm_for_the_same(
    slurm: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    swept = [
        "submit",
        *TINY,
        "cluster.memory=80GiB",
        "--sweep",
        f"cluster.slurm.{key}",
        "--force",
        "--dry-run",
    ]
    assert guarded(swept) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert f"--sweep: cluster.slurm.{key.partition('=')[0]} is one" in line


def test_without_slurm_it_says_so(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "sbatch").unlink()
    assert guarded(["submit", *TINY]) == 2
    assert "sbatch: SLURM's commands are not here" in capsys.readouterr().err


def test_ranks_follow_the_gpus_that_the_job_asks_for(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(slurm, "sbatch", 'case "$1" in --test-only) echo fine >&2;; *) echo "77;lab";; esac')
    settings = ("recipe=llm-tiny", "plugin=zero2", "cluster=slurm", "cluster.memory=80GiB")
    gpus = (
        "cluster.slurm.gpus_per_node=h100:4",
        "cluster.nodes=2",
        "name=big",
        "train.micro_batch=4",
    )
    assert guarded(["submit", *settings, *gpus, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["job"] == "77"
    plan = RunDir("runs/big").plan()
    assert (plan.cluster.device, plan.world_size) == ("cuda", 8)
    known = recall(RunDir("runs/big"))
    assert known is not None
    assert (known.job, known.script, known.scheduler) == ("77", document["script"], "slurm")
    assert known.section(Slurm).gpus_per_node == "h100:4"


def test_a_smoke_run_is_submitted_under_a_name_of_its_own(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(slurm, "sbatch", 'case "$1" in --test-only) echo fine >&2;; *) echo "77;lab";; esac')
    assert guarded(["submit", *TINY, "name=real", "cluster.nodes=2", "--smoke", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"].startswith("real-smoke-")
    plan = RunDir(document["run_dir"]).plan()
    assert (plan.smoke, plan.cluster.nodes, plan.train.max_steps) == (True, 2, 2)


@pytest.mark.parametrize(
    ("section", "asked"),
    [
        (Slurm(gpus_per_node=8), ("", 8)),
        (Slurm(gpus_per_node="a100:4"), ("a100", 4)),
        (Slurm(gres="gpu"), ("", 1)),
        (Slurm(gres="gpu:2"), ("", 2)),
        (Slurm(gres="tmp:1G,gpu:h100:8(S:0-1)"), ("h100", 8)),
        (Slurm(gres="tmp:1G"), ("", 0)),
        (Slurm(), ("", 0)),
    ],
)
def test_gpus_of_a_job(section: Slurm, asked: tuple[str, int]) -> None:
    assert asked_gpus(section) == asked


def test_states_are_asked_for_in_order_and_each_only_what_is_still_unknown(slurm: Path) -> None:
    put(slurm, "squeue", 'echo "1|PENDING|Resources"; echo "2_0|RUNNING|None"; exit 0')
    put(slurm, "scontrol", 'test "$4" = 3 && echo "JobId=3 JobState=FAILED Reason=NonZero X=y"')
    put(slurm, "sacct", 'test "$1" = -c && echo "4|CANCELLED by 0"')
    found = queue.ask([Submitted(job=job, script="") for job in ("1", "2_0", "3", "4", "5")]).states
    assert found["1"] == JobState(state="PENDING", reason="Resources", asked="squeue")
    assert found["2_0"] == JobState(state="RUNNING", asked="squeue")
    assert (found["3"].state, found["3"].reason, found["3"].asked) == (
        *("FAILED", "NonZero"),
        "scontrol",
    )
    assert (found["4"].state, found["4"].asked) == ("CANCELLED", "sacct")
    assert "5" not in found


def test_a_slurm_that_hangs_costs_a_bounded_time(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ASK_S", 0.3)
    for name in ("squeue", "scontrol", "sacct"):
        put(slurm, name, "exec sleep 30")
    started = time.monotonic()
    answers = queue.ask([Submitted(job=job, script="") for job in ("1", "2", "3")])
    assert time.monotonic() - started < 10
    assert answers.states == {}
    assert "no answer" in answers.trouble


def test_refused_jobs_show_the_reason_alone(slurm: Path, capsys: pytest.CaptureFixture) -> None:
    put(slurm, "sbatch", "echo 'sbatch: error: Batch job submission failed: Why' >&2; exit 1")
    assert guarded(["submit", *TINY, "name=no"]) == 2
    err = capsys.readouterr().err
    assert "SLURM refuses the job: Batch job submission failed: Why" in err
    assert not Path("runs/no").exists()


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_what_is_wrong_with_a_combination_names_it(
    slurm: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    where = TINY if verb == "submit" else TINY[:2]
    words = ["name=odd", "--sweep", "train.seed=0,1", "optim.lr=1e-3,-1"]
    assert guarded([verb, *where, *words]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert line.startswith("error: with optim.lr=-1: optim.lr=-1.0: expected a number")
    assert not Path("runs").exists()


def test_a_combination_that_does_not_fit_is_named(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cluster.memory=1MiB", "name=odd", "--sweep", "train.seed=0,1", "--dry-run"]
    assert guarded(["submit", *TINY, *words]) == 3
    assert "error: with train.seed=0: zero2 needs at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        "DNS SRV lookup failed\nsbatch: fatal: Could not establish a configuration source",
        "Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "allocation failure: Socket timed out on send/recv operation",
    ],
)
def test_a_slurm_that_cannot_be_reached_refuses_nothing(
    slurm: Path, capsys: pytest.CaptureFixture, said: str
) -> None:
    reason = said.rpartition("fatal: ")[2]
    for words in ([], ["--sweep", "train.seed=1,2"], ["--test-only"]):
        put(slurm, "sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1")
        assert guarded(["submit", *TINY, "name=no", *words]) == 2
        line = f"error: SLURM cannot be reached from here ({reason}); `--dry-run` prints the script"
        assert capsys.readouterr().err.splitlines()[-1] == line
    taken = 'if [ "$1" = --test-only ]; then exit 0; fi'
    put(slurm, "sbatch", f"{taken}; echo 'sbatch: error: {said}' >&2; exit 1")
    assert guarded(["submit", *TINY, "name=later"]) == 2
    assert "SLURM cannot be reached from here" in capsys.readouterr().err


def test_every_combination_the_last_changing_fastest() -> None:
    assert combinations(["a.b=1,2", "c=x", "d=[1,2],[3]"]) == [
        ["a.b=1", "c=x", "d=[1,2]"],
        ["a.b=1", "c=x", "d=[3]"],
        ["a.b=2", "c=x", "d=[1,2]"],
        ["a.b=2", "c=x", "d=[3]"],
    ]
    assert combinations(['plugin.overrides={"blocks.0":{reshard:false}}']) == [
        ['plugin.overrides={"blocks.0":{reshard:false}}']
    ]
    with pytest.raises(ConfigError):
        combinations(["a=1,2", "b=[1"])


def test_elements_have_names_and_know_what_was_chosen() -> None:
    found = elements_of(["name=s w", "optim.lr=1,2", "recipe=r"])
    assert [e.run for e in found] == ["s-w-0", "s-w-1"]
    assert [e.chosen for e in found] == [{"optim.lr": "1"}, {"optim.lr": "2"}]
    assert found[1].overrides[-1] == "name=s-w-1"
    with pytest.raises(UsageError, match="more than 1000"):
        elements_of([f"{key}={','.join(map(str, range(40)))}" for key in ("a", "b")])


def test_a_snapshot_is_what_git_tracks_now(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    git = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@y"]
    (tree / "sub" / "model.py").write_text("old")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (tree / "sub" / "model.py").write_text("edited")
    (tree / "sub" / "notes.txt").write_text("unknown to git")
    place = copy_tracked_files(tree / "sub", tmp_path / "code")
    assert place == tmp_path / "code" / "sub"
    assert (place / "model.py").read_text() == "edited"
    assert not (place / "notes.txt").exists()
    assert subprocess.run([*git, "stash", "list"], capture_output=True).stdout == b""
    with pytest.raises(UsageError, match="snapshot"):
        copy_tracked_files(tmp_path, tmp_path / "other")


def test_a_requeued_job_takes_over_from_its_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    liveness.claim(rundir)
    holder = json.loads(rundir.launcher_file.read_text())
    rundir.launcher_file.write_text(json.dumps(holder | {"host": "lost", "pid": 1}))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(UsageError, match="launches this run already"):
        liveness.claim(rundir)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with liveness.claim(rundir):
        launcher = liveness.launcher_of(rundir)
        assert launcher is not None
        assert launcher.host != "lost"


def submitted(name: str) -> RunDir:
    """A run that was handed to SLURM as job 7."""
    assert guarded(["submit", *TINY, f"name={name}", "cluster.slurm.comment=x"]) == 0
    return RunDir(f"runs/{name}")


def test_stop_takes_a_waiting_job_out_for_good(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(slurm, "sbatch", 'case "$1" in --test-only) ;; *) echo 7;; esac')
    rundir = submitted("waits")
    put(slurm, "squeue", 'echo "7|PENDING|Priority"')
    put(slurm, "scancel", 'echo "$@" > cancelled')
    assert guarded(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (row["job"], row["job_state"], row["job_reason"]) == ("7", "PENDING", "Priority")
    assert guarded(["submit", *TINY, "name=waits"]) == 2
    assert "job 7 has this run (PENDING)" in capsys.readouterr().err
    assert guarded(["stop", "waits"]) == 0
    assert Path("cancelled").read_text() == "-- 7\n"
    assert rundir.cancel_file.exists()
    assert capsys.readouterr().out == "waits: was waiting (PENDING); job 7 is cancelled\n"
    assert guarded(["stop", "waits", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["job"]) == ("PENDING", "7")


def test_stop_of_a_job_that_is_over_says_so(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(slurm, "sbatch", 'case "$1" in --test-only) ;; *) echo 7;; esac')
    submitted("over")
    put(slurm, "squeue", 'echo "7|COMPLETED|None"')
    assert guarded(["stop", "over"]) == 2
    assert "job 7 is over (COMPLETED)" in capsys.readouterr().err


def test_lines_of_a_growing_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("one\ntwo\nthr")
    reader = Lines(Source(name="job", path=log, folder=tmp_path))
    assert reader.last(1) == ["job: two"]
    with log.open("a") as out:
        out.write("ee\nfour\n")
    assert list(reader.more()) == ["job: three", "job: four"]
    assert list(reader.more()) == []
    log.unlink()
    assert list(reader.more()) == []
