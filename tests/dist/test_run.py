"""The main job: any plugin trains, the same, and what it leaves can be trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colotrain.errors import ConfigError
from colotrain.runs.start import run_quietly
from colotrain.spec.plugins import ROWS
from tests.running import SMALL, Colotrain, losses, pid_of, wait_for_step

SAME_LOSS = 1e-4


def test_every_plugin_has_the_same_loss_at_every_step(colotrain: Colotrain) -> None:
    runs = {name: colotrain.run(*SMALL, f"plugin={name}", "train.max_steps=6") for name in ROWS}
    reference = losses(runs["zero1"])
    assert len(reference) == 6
    for name, summary in runs.items():
        assert summary["status"] == "finished"
        assert summary["optimizer_steps"] == 6
        assert summary["micro_batches"] == 12
        assert losses(summary) == pytest.approx(reference, abs=SAME_LOSS), name


def test_sample_ledger_and_losses_do_not_depend_on_the_number_of_ranks(
    colotrain: Colotrain,
) -> None:
    ledgers, histories = [], []
    for ranks in (1, 2, 4):
        name = f"ranks-{ranks}"
        summary = colotrain.run(
            *SMALL,
            f"name={name}",
            "plugin=zero3",
            "train.max_steps=3",
            f"cluster.procs_per_node={ranks}",
        )
        histories.append(losses(summary))
        ledger: dict[int, list[int]] = {}
        for event in colotrain.events(name):
            if event.kind == "step":
                ledger.setdefault(event.fields["step"], []).extend(event.fields["samples"])
        ledgers.append({step: sorted(ids) for step, ids in ledger.items()})
    assert ledgers[0] == ledgers[1] == ledgers[2]
    assert len(ledgers[0][1]) == 8
    assert histories[1] == pytest.approx(histories[0], abs=1e-5)
    assert histories[2] == pytest.approx(histories[0], abs=1e-5)


TWENTY = (*SMALL, "plugin=zero2", "train.max_steps=20", "checkpoint.every=5")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of twenty steps that nothing happens to."""
    return losses(Colotrain(tmp_path_factory.mktemp("straight")).run(*TWENTY))


def test_a_killed_worker_is_recovered_from_with_exactly_the_same_losses(
    colotrain: Colotrain,
    started: Callable[[subprocess.Popen], subprocess.Popen],
    straight: list[float],
) -> None:
    process = started(colotrain.start("run", *TWENTY, "name=hurt", "--json"))
    wait_for_step(colotrain, "hurt", 6)
    os.kill(pid_of(colotrain, "hurt", 1), signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    hurt = json.loads(out)
    assert hurt["restarts"] == 1
    assert losses(hurt) == straight
    restart = next(e for e in colotrain.events("hurt") if e.kind == "restart")
    assert "rank 1 was killed by SIGKILL" in restart.fields["cause"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops_and_resume_goes_on_exactly(
    colotrain: Colotrain,
    started: Callable[[subprocess.Popen], subprocess.Popen],
    straight: list[float],
    number: signal.Signals,
    code: int,
) -> None:
    process = started(colotrain.start("run", *TWENTY, "name=stopped"))
    wait_for_step(colotrain, "stopped", 3)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    resumed = colotrain("resume", "stopped", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == straight
    assert resumed.json["optimizer_steps"] == 20


def test_workers_die_with_their_launcher(
    colotrain: Colotrain, started: Callable[[subprocess.Popen], subprocess.Popen]
) -> None:
    process = started(
        colotrain.start("run", *SMALL, "plugin=zero1", "name=orphans", "train.max_steps=5000")
    )
    wait_for_step(colotrain, "orphans", 1)
    pids = [pid_of(colotrain, "orphans", rank) for rank in (0, 1)]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their launcher"
        time.sleep(0.05)
    assert (
        next(run for run in colotrain("runs", "--json").json if run["name"] == "orphans")["state"]
        == "dead"
    )


def test_the_first_failing_rank_is_what_the_user_sees(colotrain: Colotrain) -> None:
    (colotrain.cwd / "broken.py").write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "class Model(nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 1); self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls > 3 and self.training:\n"
        "            raise ValueError('the reactor is too warm')\n"
        "        return super().forward(x).square().mean()\n"
        "def data(): return [{'x': torch.ones(2) * i} for i in range(64)]\n"
    )
    result = colotrain(
        "run",
        "model.target=broken:Model",
        "data.target=broken:data",
        "train.global_batch=4",
        "train.micro_batch=2",
        "cluster.procs_per_node=2",
        "elastic.max_restarts=0",
        "plugin=zero2",
    )
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "rank 1" in errors[0]
    assert "the reactor is too warm" in errors[0]
    log = errors[0].split("log: ")[1].split(";")[0]
    assert "broken.py" in Path(log).read_text()


def test_frozen_parameters_are_counted_and_never_change(colotrain: Colotrain) -> None:
    import torch

    from colotrain.models.loading import build_whole
    from tests.checkpoints import read_whole

    freeze = "freeze.patterns=[embed*,blocks.0.*]"
    plan = colotrain("plan", *SMALL, freeze, "plugin=zero1", "--json").json
    assert plan["parameters"]["frozen"] > 0
    assert [entry["pattern"] for entry in plan["freeze"]] == ["embed*", "blocks.0.*"]
    for name in ROWS:
        colotrain.run(*SMALL, freeze, f"plugin={name}", f"name={name}", "train.max_steps=3")
        rundir = colotrain.rundir(name)
        initial = build_whole(rundir.plan().model, seed=0)
        saved = read_whole(rundir.checkpoint(3))
        for key, before in initial.named_parameters():
            after = saved[f"model.{key}"]
            frozen = key.startswith(("embed", "blocks.0."))
            assert torch.equal(before, after) == frozen, (name, key)
            assert (f"optim.{key}.exp_avg" in saved) != frozen, (name, key)


@pytest.mark.slow
def test_signals_to_the_whole_process_group_save_once(
    colotrain: Colotrain, started: Callable[[subprocess.Popen], subprocess.Popen]
) -> None:
    process = started(
        colotrain.start("run", *SMALL, "name=group", "train.max_steps=5000", new_session=True)
    )
    wait_for_step(colotrain, "group", 3)
    os.killpg(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    rundir = colotrain.rundir("group")
    assert len(list(rundir.checkpoints.glob("step-*/manifest.json"))) == 1
    assert not [e for e in colotrain.events("group") if e.kind == "restart"]


def test_a_reader_that_goes_away_does_not_stop_training(
    colotrain: Colotrain, started: Callable[[subprocess.Popen], subprocess.Popen]
) -> None:
    process = started(colotrain.start("run", *SMALL, "name=piped", "train.max_steps=30"))
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    process.wait(timeout=120)
    assert json.loads(colotrain.rundir("piped").summary_file.read_text())["status"] == "finished"


def test_a_run_without_evaluation_collects_garbage_but_not_among_what_was_imported(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "hooks.py").write_text(
        "import gc\n"
        "def look(model, step):\n"
        "    print('gc', gc.isenabled(), gc.get_freeze_count())\n",
        "utf-8",
    )
    words = ("train.eval_steps=0", "train.eval_every=1", "train.on_gradients=hooks:look")
    summary = colotrain.run(*SMALL, *words, "name=bare", "train.max_steps=2")
    assert summary["status"] == "finished"
    assert not [event for event in colotrain.events("bare") if event.kind == "eval"]
    logs = [path.read_text() for path in colotrain.rundir("bare").logs.rglob("stdout.log")]
    told = [line.split() for log in logs for line in log.splitlines() if line.startswith("gc ")]
    assert len(told) == 4
    assert all(enabled == "True" and int(frozen) > 100_000 for _, enabled, frozen in told)


def test_the_threads_of_the_environment_count_in_a_run_and_the_next_ones_when_it_is_resumed(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "hooks.py").write_text(
        "import torch\ndef look(model, step):\n    print('threads', torch.get_num_threads())\n"
    )
    words = (*SMALL, "name=threads", "train.on_gradients=hooks:look", "train.eval_steps=0")
    for steps, threads in ((1, "3"), (2, "2")):
        verb = ("run", *words) if steps == 1 else ("resume", "threads")
        result = colotrain(*verb, f"train.max_steps={steps}", env={"OMP_NUM_THREADS": threads})
        assert result.code == 0, result.err
        assert colotrain.rundir("threads").plan().cluster.threads_per_rank == int(threads)
    logs = [path.read_text() for path in colotrain.rundir("threads").logs.rglob("stdout.log")]
    told = [line.split()[1] for log in logs for line in log.splitlines() if "threads " in line]
    assert sorted(told) == ["2", "2", "3", "3"]


def test_a_damaged_checkpoint_is_passed_over_and_never_kept_for_a_good_one(
    colotrain: Colotrain,
) -> None:
    run = ("name=hurt", "plugin=zero2", "checkpoint.every=1", "optim.schedule.name=constant")
    straight = colotrain.run(*SMALL, *run[1:], "name=straight", "train.max_steps=4")
    colotrain.run(*SMALL, *run, "train.max_steps=3", "checkpoint.keep=3")
    rundir = colotrain.rundir("hurt")
    shard = next(rundir.checkpoint(3).glob("__1_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = colotrain("resume", "hurt", "train.max_steps=4", "checkpoint.keep=1", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == losses(straight)
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-00000004"]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    colotrain.run(*SMALL, "name=kept", "train.max_steps=3", "plugin=zero1")
    rundir = colotrain.rundir("kept")
    files = (rundir.plan_file, rundir.config_file, rundir.summary_file)
    before = [file.read_bytes() for file in files]
    result = colotrain("resume", "kept", "train.global_batch=16", "train.max_steps=5")
    assert result.code == 2
    assert "train.global_batch=16: expected 8, as in " in result.err
    assert [file.read_bytes() for file in files] == before
    began = len(colotrain.events("kept"))
    earlier = "checkpoint.resume=runs/kept/checkpoints/step-00000003"
    shorter = {
        ("train.max_steps=2",): "train.max_steps=2: expected at least 3, the steps that ",
        ("train.max_steps=2", earlier): "train.max_steps=2: expected at least 3, the steps that ",
        ("train.epochs=1e-5",): "train.epochs=1e-05: expected at least the 3 steps that ",
    }
    for settings, said in shorter.items():
        result = colotrain("resume", "kept", *settings)
        assert (result.code, said in result.err) == (2, True), result.err
        assert [file.read_bytes() for file in files] == before
    elsewhere = [*SMALL, "name=new", "checkpoint.resume=runs/kept", "train.max_steps=2"]
    result = colotrain("run", *elsewhere, "--detach")
    assert (result.code, "expected at least 3" in result.err) == (2, True), result.err
    job = ("submit", *elsewhere[:-1], "cluster=slurm", "cluster.procs_per_node=1", "--dry-run")
    result = colotrain(*job, "train.max_steps=2")
    problems = [line for line in result.err.splitlines() if line.startswith("error")]
    assert (result.code, result.out, len(problems)) == (2, "", 1), result.err
    assert "train.max_steps=2: expected at least 3, the steps that " in problems[0]
    for verb in (job, ("run", *elsewhere[:-1])):
        result = colotrain(*verb, "--sweep", "train.max_steps=3,2")
        assert (result.code, result.out) == (2, ""), result.err
        assert "error: with train.max_steps=2: train.max_steps=2: expected at" in result.err
    assert colotrain(*job, "train.max_steps=3").code == 0
    monkeypatch.chdir(colotrain.cwd)
    with pytest.raises(ConfigError, match="expected at least 3, the steps that "):
        run_quietly(elsewhere, progress=False, force=False)
    assert not colotrain.rundir("new").path.exists()
    assert colotrain.resume("kept", "train.max_steps=3")["steps"] == 3
    assert [e.kind for e in colotrain.events("kept")[began:]].count("step") == 0
    before = [file.read_bytes() for file in files]
    result = colotrain("resume", "kept", "model.args.d_hidden=96", "train.max_steps=5")
    assert (result.code, "in the checkpoint; resume with the model" in result.err) == (2, True)
    assert [file.read_bytes() for file in files[:2]] == before[:2]
    assert colotrain.resume("kept", "train.max_steps=5")["steps"] == 5


@pytest.mark.slow
def test_nobody_else_can_read_what_a_run_leaves(tmp_path: Path) -> None:
    """Whatever the umask, and whoever writes it: ranks, launcher, torch, trackers, uploader."""
    before = os.umask(0)
    try:
        done = Colotrain(tmp_path)(
            *("run", *SMALL, "name=mine", "train.max_steps=3", "checkpoint.every=2"),
            *("observe.grads_every=1", "observe.samples.prompts=[a]", "train.profile.steps=[2,3]"),
            *("observe.notify.command=[cat]", f"runs_dir=file://{tmp_path}/store"),
        )
    finally:
        os.umask(before)
    assert done.code == 0, done.err
    found = [path for path in (tmp_path / "runs").rglob("*") if path.stat().st_mode & 0o077]
    assert found == []
