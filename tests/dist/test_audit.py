"""`colotrain audit` finds injected faults, names them, and finds none where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.audit.checks import check
from colotrain.audit.command import START
from colotrain.audit.evidence import evidence
from colotrain.audit.verdicts import Verdict
from colotrain.events.gradients import records
from colotrain.rundir import RunDir
from tests.representatives import of_each_day, selected
from tests.running import Colotrain, Result

SCRIPT = Path(__file__).with_name("audited.py")
RANKS = {"plain": 1, "ddp": 2, "fully_shard": 2}
ARGUMENTS = {"fully_shard": ("fully_shard",)}
LINES = SCRIPT.read_text("utf-8").splitlines()
STEP = "scaler.step(optimizer)"
BACKWARD = "scaler.scale(loss).backward()"
FAULTS = {
    "undivided": ("accumulation", BACKWARD),
    "divided-twice": ("accumulation", "loss = loss / ACCUMULATION"),
    "step-each": ("accumulation", "loss = loss / ACCUMULATION"),
    "stepped-twice": ("steps", "optimizer.step()"),
    "zeroed-each": ("zeroing", "optimizer.zero_grad()"),
    "zeroed-before": ("zeroing", "optimizer.zero_grad()"),
    "never-zeroed": ("zeroing", BACKWARD),
    "clip-each": ("clipping", "nn.utils.clip_grad_norm_(parameters, 0.5)"),
    "clip-after": ("clipping", "nn.utils.clip_grad_norm_(parameters, 0.5)"),
    "clip-before-unscale": ("clipping", "nn.utils.clip_grad_norm_(parameters, 0.5)"),
    "schedule-each": ("scheduler", "scheduler.step()"),
    "schedule-first": ("scheduler", "scheduler.step()"),
    "missing": ("parameters", "optimizer = torch.optim.SGD("),
    "twice": ("parameters", "optimizer = torch.optim.SGD("),
    "other-model": ("parameters", "optimizer = torch.optim.SGD("),
    "idle": ("parameters", BACKWARD),
    "frozen-decays": ("frozen", STEP),
    "mean-of-means": ("targets", BACKWARD),
    "reentrant": ("checkpointing", "checkpoint(self.first"),
}
"""Fault → the check that finds it, and what stands on the line that it names."""
BETWEEN_RANKS = {
    "never-exchanged": ("gradient", STEP),
    "summed": ("gradient", STEP),
    "local-clip": ("clipping", "nn.utils.clip_grad_norm_(parameters, 0.01)"),
    "divided-by-ranks": ("accumulation", "loss = loss / WORLD"),
    "different-weights": ("weights", ""),
    "same-data": ("data", ""),
    "same-dropout": ("dropout", ""),
    "rank-skips": ("ranks", ""),
}
NOT_SHARDED = ("never-exchanged", "summed", "local-clip")
"""What cannot occur where the engine reduces gradients by itself."""
CORRECT = ("", "adamw", "scaler", "weighted")
FRAMEWORKS = ("plain", "ddp", "fully_shard")
CASES = [
    *((fault, framework) for fault in FAULTS for framework in FRAMEWORKS),
    *((fault, "ddp") for fault in BETWEEN_RANKS),
    *((fault, "fully_shard") for fault in BETWEEN_RANKS if fault not in NOT_SHARDED),
]
KEPT = [("divided-twice", "fully_shard"), ("clip-each", "plain"), ("never-exchanged", "ddp")]


def command(*words: str, ranks: int = 1) -> list[str]:
    if ranks == 1:
        return [sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *words]


def audit(
    colotrain: Colotrain, *words: str, ranks: int = 1, options: tuple[str, ...] = ()
) -> Result:
    given = command(*words, ranks=ranks)
    return colotrain("audit", "--json", *options, "--", *given, env={"OMP_NUM_THREADS": "1"})


def wrong(result: Result) -> dict[str, dict]:
    return {c["check"]: c for c in result.json["checks"] if c["outcome"] == "wrong"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_correct_script_has_no_fault(colotrain: Colotrain, ranks: int) -> None:
    result = audit(colotrain, str(SCRIPT), ranks=ranks)
    outcomes = {c["check"]: c["outcome"] for c in result.json["checks"]}
    assert outcomes == dict.fromkeys(outcomes, "ok"), result.out
    assert (result.code, result.json["steps"], result.json["ranks"]) == (0, 3, ranks)


def check_found(result: Result, check: str, line: str, *, code: int = 4) -> None:
    assert result.code == code, result.out
    found = wrong(result)[check]
    numbers = [int(site.split(":")[1].split()[0].rstrip(")")) for site in found["sites"]]
    named = [LINES[number - 1].strip() for number in numbers]
    assert not line or any(line in text for text in named), (found, named)


def observed(folder: Path, scripts: list[Any]) -> dict[str, dict[str, Verdict]]:
    """Verdicts by name and check of scripts that run in the forks of one process."""
    environment = {"PYTHONPATH": str(START), "COLOTRAIN_AUDIT": str(folder), "OMP_NUM_THREADS": "1"}
    many = [sys.executable, SCRIPT.with_name("audited_many.py"), folder, json.dumps(scripts)]
    subprocess.run(many, env={**os.environ, **environment}, check=True, capture_output=True)
    names = [name for name, *_ in scripts]
    return {name: {v.check: v for v in check(evidence(RunDir(folder / name)))} for name in names}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The verdicts of all cases that tests ask for, observed in one process and its forks."""
    folder = tmp_path_factory.mktemp("audits")
    cases = sorted(case for (case,) in selected(request, "case"))
    scripts = [
        ("-".join(case), RANKS[case[1]], str(SCRIPT), case[0], *ARGUMENTS.get(case[1], ()))
        for case in cases
    ]
    found = observed(folder, scripts)
    return {case: found["-".join(case)] for case in cases}


@pytest.mark.parametrize("case", of_each_day(CASES, kept=KEPT), ids="-".join)
def test_a_fault_is_found_and_named_by_its_line(verdicts: Any, case: tuple[str, str]) -> None:
    name, line = {**FAULTS, **BETWEEN_RANKS}[case[0]]
    found = verdicts[case]
    assert found[name].outcome == "wrong", found
    numbers = [int(site.rpartition(":")[2].rstrip(")")) for site in found[name].sites]
    named = [LINES[number - 1].strip() for number in numbers]
    assert not line or any(line in text for text in named), (found[name], named)


CORRECT_CASES = [(variant, framework) for variant in CORRECT for framework in FRAMEWORKS]


@pytest.mark.parametrize(
    "case", of_each_day(CORRECT_CASES, kept=[("scaler", "fully_shard")]), ids="-".join
)
def test_no_fault_is_found_where_none_is(verdicts: Any, case: tuple[str, str]) -> None:
    outcomes = {v.check: v.outcome for v in verdicts[case].values()}
    assert outcomes == dict.fromkeys(outcomes, "ok"), verdicts[case]


def test_a_fault_is_named_on_the_command_line(colotrain: Colotrain) -> None:
    result = audit(colotrain, str(SCRIPT), "divided-twice", ranks=2)
    assert result.code == 4, result.out
    (site, *_) = wrong(result)["accumulation"]["sites"]
    assert LINES[int(site.rpartition(":")[2]) - 1].strip() == "loss = loss / ACCUMULATION"


def test_the_table_has_plain_torchs_gradients(colotrain: Colotrain) -> None:
    """Of a script whose gradients are computed here once more, in float64."""
    (colotrain.cwd / "train.py").write_text(
        "import torch\n"
        "torch.manual_seed(3)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))\n"
        "net[0].bias.requires_grad_(False)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "x = torch.randn(9, 5)\n"
        "for step in range(2):\n"
        "    optimizer.zero_grad()\n"
        "    net(x).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    result = audit(colotrain, "train.py")
    assert result.code == 0, result.out
    first, *_ = records(RunDir(colotrain.cwd / "runs" / result.json["run"]))
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    x = torch.randn(9, 5)
    net.double()(x.double()).square().mean().backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    assert [row.name for row in first.parameters] == list(wanted)
    for row in first.parameters:
        if row.name == "0.bias":
            assert (row.status, row.norm) == ("frozen", None)
            continue
        assert row.status == "trained"
        assert row.norm == pytest.approx(float(wanted[row.name].norm()), rel=1e-6)
        assert row.max_abs == pytest.approx(float(wanted[row.name].abs().max()), rel=1e-6)


def test_the_scripts_output_and_exit_code_are_its_own(colotrain: Colotrain) -> None:
    (colotrain.cwd / "fails.py").write_text(
        "import sys, torch\nprint('{\"a\": 1}')\nsys.stdout.flush()\nraise SystemExit(7)\n"
    )
    result = colotrain("audit", "--", sys.executable, "fails.py")
    assert json.loads(result.out) == {"a": 1}
    assert result.code == 1
    assert "error: the command ended with exit code 7: its own error" in result.err


def test_steps_ends_the_script_and_nothing_of_it_is_told_as_an_error(colotrain: Colotrain) -> None:
    result = audit(colotrain, str(SCRIPT), options=("--steps", "2"))
    assert (result.code, result.json["steps"]) == (0, 2), result.out
    assert '{"trained": true}' not in result.err  # it did not get there


@pytest.mark.slow
def test_a_fork_and_a_spawned_process_are_observed_by_themselves(colotrain: Colotrain) -> None:
    (colotrain.cwd / "spawns.py").write_text(
        "import sys, runpy, torch, multiprocessing\n"
        "def work(argv):\n"
        "    sys.argv = argv\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[1])\n"
        "    child = context.Process(target=work, args=(['x', 'divided-twice'],))\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    for method in ("fork", "spawn"):
        result = audit(colotrain, "spawns.py", method)
        assert result.code == 4, result.out
        assert set(wrong(result)) == {"accumulation", "update"}


def test_a_crash_at_import_is_the_scripts_own(colotrain: Colotrain) -> None:
    (colotrain.cwd / "crashes.py").write_text("import torch\nimport no_such_module\n")
    plain = subprocess.run([sys.executable, "crashes.py"], cwd=colotrain.cwd, capture_output=True)
    result = colotrain("audit", "--", sys.executable, "crashes.py")
    assert result.code == plain.returncode == 1
    assert plain.stderr.decode() in result.err
    told = " ".join(result.err.split())
    assert "no check could be made: no Python process of the command made an optimizer step" in told
    assert "CHECK" not in result.err


@pytest.mark.slow
def test_a_subprocess_of_a_script_is_observed_and_keeps_its_pipes(colotrain: Colotrain) -> None:
    (colotrain.cwd / "starts.py").write_text(
        "import subprocess, sys\n"
        f"words = [sys.executable, {str(SCRIPT)!r}, 'clip-each']\n"
        "made = subprocess.run(words, capture_output=True, text=True)\n"
        "print(made.stdout + made.stderr, end='')\n"
    )
    result = colotrain("audit", "--", sys.executable, "starts.py", env={"OMP_NUM_THREADS": "1"})
    assert result.out == '{"trained": true}\n'
    assert result.code == 4
    assert "clipped after 1 of 4 micro-batches" in " ".join(result.err.split())


def test_an_audit_is_read_as_a_run(colotrain: Colotrain) -> None:
    result = audit(colotrain, str(SCRIPT), "")
    name = result.json["run"]
    table = colotrain("inspect-grads", name, "--json").json
    assert [row["status"] for row in table["parameters"]] == ["trained"] * 6
    shown = colotrain("dashboard", name, "--once")
    assert (shown.code, name in shown.out) == (0, True), shown.err
    assert colotrain("plot", name).code == 0


@pytest.mark.slow
def test_an_interrupt_reaches_the_script_and_ends_the_audit(colotrain: Colotrain) -> None:
    (colotrain.cwd / "hangs.py").write_text(
        "import torch, time\nopen('ready', 'w').close()\ntime.sleep(600)\n"
    )
    process = colotrain.start("audit", "--", sys.executable, "hangs.py", new_session=True)
    deadline = time.monotonic() + 60
    while not (colotrain.cwd / "ready").exists():
        assert time.monotonic() < deadline, "the script did not start"
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "no Python process of the command made an optimizer step" in " ".join(err.split())
