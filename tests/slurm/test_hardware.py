"""What `submit` plans where SLURM's nodes are not like the machine it is called on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from colotrain.rundir import RunDir
from tests.slurm.lab import missing, running
from tests.slurm.test_jobs import Site

REASON = missing()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
]
JOB = ("recipe=llm-7b", "plugin=auto", "cluster=slurm", "cluster.nodes=4")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A login node without GPUs, and four nodes with eight H100s and 1 TiB each."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "work").mkdir()
    with running(folder / "lab", nodes=4, gres="gpu:h100:8", memory_mb=1 << 20) as lab:
        yield Site(lab, folder / "work")


def test_a_job_is_planned_for_the_gpus_that_slurms_nodes_have(site: Site) -> None:
    script = site.colotrain("submit", *JOB, "--dry-run")
    assert "#SBATCH --gpus-per-node=h100:8\n" in script
    assert "#SBATCH --nodes=4\n" in script
    planned = json.loads(site.colotrain("plan", *JOB, "name=big", "--json"))
    assert (planned["world_size"], planned["memory"]["fits"]) == (32, True)
    assert planned["memory"]["capacity"] == int(79.1 * (1 << 30))
    assert planned["time"]["step_s"] > 0

    waits = ("name=big", "+cluster.slurm.extra.hold=true")
    job = json.loads(site.colotrain("submit", *JOB, *waits, "--json"))["job"]
    plan = RunDir(site.cwd / "runs" / "big").plan()
    assert (plan.world_size, plan.cluster.device, plan.cluster.nodes) == (32, "cuda", 4)
    assert plan.plugin.name == planned["plugin"]["name"]
    assert "gres:gpu:h100:8" in site.lab("scontrol", "show", "job", "-o", job)
    site.lab("scancel", job)


def test_more_gpus_than_a_node_has_are_refused_by_slurm(site: Site) -> None:
    asked = ("cluster.slurm.gpus_per_node=h100:9", "name=many")
    said = site.colotrain("submit", *JOB, *asked, "train.global_batch=576", code=2)
    assert "SLURM refuses the job" in said
