"""What people do beside `submit`: scripts of their own, the doctor in an allocation, odd texts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colotrain.schedulers.job import Job
from colotrain.schedulers.slurm import render
from colotrain.schedulers.slurm_settings import Slurm
from tests.slurm.lab import missing
from tests.slurm.test_jobs import FAST, PLAN, WAIT_S, Site, _site

REASON = missing()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(1800),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "colotrain.sbatch"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _site(tmp_path_factory.mktemp("slurm"), requeue_exit=True)


@pytest.mark.slow
def test_the_script_for_hand_writers_runs_on_two_nodes(site: Site) -> None:
    settings = [o for o in (*PLAN, FAST) if not o.startswith(("cluster.nodes", "cluster=slurm"))]
    text = SCRIPT.read_text()
    for name, value in (
        ("name", "by-hand"),
        ("settings", f"({shlex.join(settings)})"),
        ("command", f"({shlex.quote(sys.executable)} -m colotrain run)"),
    ):
        text, changed = re.subn(rf"^{name}=.*$", lambda _, v=f"{name}={value}": v, text, flags=re.M)
        assert changed == 1
    (site.cwd / "mine.sbatch").write_text(text)
    submitted = subprocess.run(
        ["sbatch", "--parsable", "mine.sbatch"],
        cwd=site.cwd,
        env=site.lab.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    job = submitted.stdout.strip()
    state = site.lab.wait_for(job, "COMPLETED", "FAILED", timeout_s=WAIT_S)
    assert state == "COMPLETED", (site.cwd / f"colotrain-{job}.log").read_text()
    assert len(site.losses("by-hand")) == 12
    assert site.rundir("by-hand").finished_file.exists()


@pytest.mark.slow
def test_the_doctor_sees_all_nodes_of_an_allocation(site: Site) -> None:
    command = [sys.executable, "-m", "colotrain", "doctor", "--all-nodes", "--json"]
    done = subprocess.run(
        ["salloc", "-N2", "--quiet", *command, "--only", "runs,cpu"],
        cwd=site.cwd,
        env={**site.lab.environment, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    between = {f["check"]: f["status"] for f in json.loads(done.stdout)["hosts"]["all nodes"]}
    assert between["shared folder"] == "ok"
    assert between["all-reduce"] in ("ok", "warn")


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        'a "quoted" one',
        "it's",
        'back\\slash \\" end\\',
        "$(touch HURT) `touch HURT` $HOME",
        "; touch HURT #not a comment",
        "--nodes=2",
        "é中",
    ],
)
def test_sbatch_reads_a_text_as_it_was_written(site: Site, text: str) -> None:
    job = Job(
        name="odd", nodes=1, runs=("/r",), logs=str(site.cwd), cwd=str(site.cwd), python="false"
    )
    script = render(job, Slurm(comment=text, extra={"hold": True}))
    (site.cwd / "odd.sbatch").write_text(script)
    number = site.lab("sbatch", "--parsable", str(site.cwd / "odd.sbatch")).strip()
    assert number, "sbatch refused it"
    shown = site.lab("scontrol", "show", "job", number)
    assert re.search(r"^\s*Comment=(.*?) ?$", shown, re.M)[1] == text  # type: ignore[index]
    assert "NumNodes=1-1 " in shown
    site.lab("scancel", number)
    assert not (site.cwd / "HURT").exists()
