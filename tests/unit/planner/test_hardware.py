"""Hardware that is not this machine: described, named, or asked of SLURM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.config.shipped import Search
from colotrain.errors import ConfigError
from colotrain.planner.hardware import LINK_SHARE, MEMORY_SHARE
from colotrain.rundir import RunDir
from colotrain.runs.job import hardware_of
from colotrain.runs.resolving import resolve_config
from colotrain.schedulers import slurm_queue as queue
from colotrain.schedulers.job import NodeKind
from tests.running import SMALL

SEVEN = ("recipe=llm-tiny", "train.global_batch=64", "train.micro_batch=1")
H100 = "10|main*|2|48|1031000|gpu:h100:8(S:0-1)"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node: SLURM's commands are in a folder, and the current folder is empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path / "work")
    return folder


def nodes(site: Path, *lines: str) -> None:
    """Have sinfo print these lines, and sbatch take every job."""
    text = "\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), "exit 0\n"])
    (site / "sinfo").write_text(text)
    (site / "sbatch").write_text('#!/bin/sh\ncase "$1" in --test-only) ;; *) echo 7;; esac\n')
    for name in ("sinfo", "sbatch"):
        (site / name).chmod(0o755)


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = guarded(["plan", *words, "--json"])
    printed = capsys.readouterr()
    assert code in (0, 3), printed.err
    return json.loads(printed.out)


def test_hardware_of_ones_own_needs_a_name_and_what_is_known_of_it() -> None:
    write("conf/hardware/mine.yaml", "name: mine\nmemory: 12GiB\ndevices_per_node: 4\n")
    plan = resolve_config([*SEVEN, "hardware=mine", "cluster.nodes=2"], here=False).plan
    assert (plan.world_size, plan.cluster.memory_bytes, plan.time.step_s) == (8, 12 << 30, 0)
    with pytest.raises(ConfigError) as caught:
        resolve_config([*SEVEN, "hardware=mine", "hardware.tflops={bf16:1}"], here=False)
    keys = [problem.key for problem in caught.value.problems]
    assert keys[:2] == ["hardware.tflops", "hardware.memory_gb_per_s"]


def test_tf32_is_planned_with_its_own_peak() -> None:
    words = ["recipe=llm-1b", "hardware=h100", "train.precision=fp32"]
    plain, rounded = (
        resolve_config([*words, *more], here=False).plan.time.step_s
        for more in ((), ("train.tf32=true",))
    )
    assert rounded < plain


def test_shards_of_nodes_that_divide_experts_are_gathered_between_nodes() -> None:
    own = ["model.target=tests.dist.own_experts:make", "mesh.ep_plan=['blocks.*.experts']"]
    own += ["data.target=tests.dist.own_experts:samples", "train.global_batch=8", "plugin=zero3"]
    own += ["train.micro_batch=1", "cluster.procs_per_node=4", "hardware=h100", "cluster.nodes=2"]
    links = []
    for ep in (4, 2):  # so many rings share the link of a node
        settings = resolve_config([*own, f"mesh.ep={ep}"], here=False)
        context, plan = settings.context, settings.plan
        assert context.hardware is not None
        layout = context.layout(plan.plugin)
        assert (layout.shard, layout.expert_ranks) == (8 // ep, ep)
        costs = context.hardware(layout).costs
        copies = 2 / (3350e9 * MEMORY_SHARE)
        links.append(1 / (costs.gathered_byte_s - copies) / LINK_SHARE)
    assert links == pytest.approx([400e9 / 4, 400e9 / 2])


def test_every_shipped_file_has_figures_a_source_and_a_name_of_its_own() -> None:
    search = Search.at(Path.cwd())
    names = search.names("hardware")
    assert set(names) >= {"a100-40g", "a100-80g", "h100", "h200", "l40s", "a10g", "rtx4090"}
    for name in names:
        file = search.find(f"hardware/{name}")
        assert file is not None
        assert ".com" in file.read_text() or "whitepaper" in file.read_text()
        resolved = resolve_config([*SEVEN, f"hardware={name}"], here=False)
        assert resolved.plan.time.step_s > 0
        assert hardware_of(name.replace("-", "_").upper(), search) == name


@pytest.mark.parametrize(
    ("gpu_type", "name"),
    [
        *[("h100", "h100"), ("nvidia_h100_80gb_hbm3", "h100"), ("H100-PCIe", "h100-pcie")],
        *[("a100", "a100-40g"), ("a100_80gb", "a100-80g"), ("nvidia_a100-sxm4-80gb", "a100-80g")],
        *[
            ("rtx_4090", "rtx4090"),
            ("nvidia_l40s", "l40s"),
            ("a100_3g.20gb", None),
            ("mi300x", None),
        ],
    ],
)
def test_what_slurm_calls_a_gpu_chooses_its_file(gpu_type: str, name: str | None) -> None:
    assert hardware_of(gpu_type, Search.at(Path.cwd())) == name


def test_sinfo_is_read_of_the_default_partition_or_the_one_that_is_named(site: Path) -> None:
    nodes(site, H100, "2|cpu|2|32+|256000+|(null)")
    assert queue.node_kinds() == [
        NodeKind(
            num_nodes=10,
            num_cores=96,
            memory_bytes=1031000 << 20,
            gpu_type="h100",
            num_gpus=8,
        )
    ]
    nodes(site, "2|cpu|2|32+|256000+|(null)")
    assert queue.node_kinds() == []
    (kind,) = queue.node_kinds("cpu")
    assert (kind.num_cores, kind.num_gpus, kind.memory_bytes >> 20) == (64, 0, 256000)


def test_plan_and_submit_decide_the_same_for_a_job_and_ask_slurm_what_its_nodes_are(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes(site, H100)
    words = [*SEVEN, "cluster=slurm", "cluster.nodes=4", "name=big"]
    assert guarded(["submit", *words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "#SBATCH --gpus-per-node=h100:8\n" in printed.out
    assert "note: hardware=h100: what SLURM calls h100" in printed.err
    assert guarded(["submit", *words, "--json"]) == 0
    capsys.readouterr()
    plan = RunDir("runs/big").plan()
    assert (plan.world_size, plan.cluster.device) == (32, "cuda")
    assert plan.cluster.memory_bytes == int(79.1 * (1 << 30))
    document = planned(capsys, *words)
    assert document["world_size"] == 32
    assert document["plugin"] == {"name": plan.plugin.name, "reason": plan.plugin.reason}
    assert document["memory"]["capacity"] == plan.cluster.memory_bytes
    assert document["time"]["step_s"] == plan.time.step_s > 0


def test_a_site_of_ones_own_means_a_job_for_plan_too(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("conf/cluster/mysite.yaml", "slurm: {partition: gpu, gpus_per_node: 8}\n")
    words = [*SEVEN, "cluster=mysite", "cluster.nodes=4", "hardware=h100"]
    assert planned(capsys, *words)["world_size"] == 32
    assert resolve_config(words, here=False, job=True).plan.world_size == 32
    assert planned(capsys, *SEVEN)["world_size"] < 32  # without a job it is this machine


def test_of_plugins_that_are_as_fast_auto_takes_the_simplest(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "hardware=h100", "cluster.procs_per_node=1", "plugin=auto"]
    document = planned(capsys, *words)
    assert document["plugin"]["name"] == "zero1"
    assert "the fastest that fits" in document["plugin"]["reason"]
    assert "gemini is as fast" in document["plugin"]["reason"]


def test_what_was_asked_for_is_not_decided_anew(site: Path) -> None:
    nodes(site, H100)
    asked = resolve_config(
        [*SEVEN, "cluster=slurm", "cluster.slurm.gpus_per_node=2"], here=False, job=True
    )
    assert (asked.plan.world_size, asked.config["cluster"]["slurm"]["gpus_per_node"]) == (2, 2)
    on_cpu = resolve_config([*SEVEN, "cluster=slurm", "cluster.device=cpu"], here=False, job=True)
    assert on_cpu.plan.cluster.device == "cpu"
    assert on_cpu.config["cluster"]["slurm"]["gpus_per_node"] is None
    procs = on_cpu.plan.cluster.procs_per_node
    assert on_cpu.plan.cluster.memory_bytes == (1031000 << 20) // procs
    other = resolve_config([*SEVEN, "cluster=slurm", "hardware=h200"], here=False, job=True)
    assert other.config["hardware"]["name"] == "NVIDIA H200 141 GB SXM"


def test_of_nodes_that_differ_those_are_taken_that_the_job_can_have(site: Path) -> None:
    nodes(site, "2|main*|2|48|1031000|gpu:h100:8", "40|main*|2|24|512000|gpu:l40s:4")
    many = resolve_config([*SEVEN, "cluster=slurm", "cluster.nodes=4"], here=False, job=True)
    assert many.config["hardware"]["name"] == "NVIDIA L40S"
    assert "the partition's nodes differ: planned for its 40 with 4 × l40s" in many.notices[0]
    typed = ("cluster=slurm", "cluster.slurm.gpus_per_node=h100:8")
    assert resolve_config([*SEVEN, *typed], here=False, job=True).plan.world_size == 8


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (["4|main*|2|24|512000|gpu:mi999:4"], "GPUs that SLURM calls mi999 are not known"),
        pytest.param(
            ["4|main*|2|24|512000|gpu:4"],
            "GPUs without a type are not known",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unknown_hardware_is_a_warning_and_never_a_refusal(
    site: Path, capsys: pytest.CaptureFixture[str], lines: list[str], warning: str
) -> None:
    nodes(site, *lines)
    words = ["recipe=llm-7b", "plugin=auto", "cluster=slurm", "cluster.nodes=2", "name=unknown"]
    words += ["train.global_batch=8", "data.seq_len=64"]
    assert guarded(["submit", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert f"warning: {warning}: choose hardware=NAME" in printed.err
    assert "cluster.memory: not known of these GPUs" in printed.err
    assert RunDir("runs/unknown").plan().world_size == 8
    document = planned(capsys, *words)
    assert document["memory"]["fits"]
    assert any(warning in line for line in document["warnings"])
    assert guarded(["plan", *words]) == 0
    assert guarded(["plan", *words, "plugin=gemini"]) == 0


def test_without_an_answer_of_slurm_the_plan_is_this_machines_and_says_so(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = planned(capsys, *SMALL, "cluster=slurm")
    assert document["world_size"] == 2
    assert document["warnings"][0].startswith("SLURM does not say what its nodes are (sinfo:")
    nodes(site)
    document = planned(capsys, *SMALL, "cluster=slurm", "cluster.slurm.partition=gone")
    assert "it has no partition gone" in document["warnings"][0]


@pytest.mark.parametrize("verb", ["submit", "plan"])
def test_a_job_on_cuda_that_asks_for_no_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for words in (["cluster.device=cuda", "cluster.procs_per_node=2"], ["hardware=h100"]):
        assert guarded([verb, *SEVEN, "cluster=slurm", *words]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
        assert line.startswith("error: cluster.slurm.gpus_per_node: expected GPUs for the ranks")
    words = ["hardware=h100", "+cluster.slurm.extra.exclusive=true"]
    resolve_config([*SEVEN, "cluster=slurm", *words], here=False, job=True)


def test_a_job_does_not_train_on_the_cpu_of_a_login_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = [*SMALL, "cluster=slurm", "cluster.procs_per_node=1"]
    assert guarded(["run", *job]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: cluster.device=auto: expected a device by name")
    assert "`colotrain submit` with the same arguments runs it there" in line
    assert resolve_config([*job, "cluster.device=cpu"]).plan.cluster.device == "cpu"  # asked for
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert resolve_config(job).plan.cluster.device == "cpu"  # on a node of the job


def test_a_job_is_gone_on_with_as_a_job(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A login node has none of the job's GPUs: `resume` there says how a job goes on."""
    nodes(site, H100)
    job = [*SEVEN, "cluster=slurm", "name=far"]
    assert guarded(["submit", *job]) == 0
    assert RunDir("runs/far").plan().cluster.device == "cuda"
    changed = ["optim.lr=0.5"]
    submit = "colotrain submit recipe=runs/far/config.yaml"
    again, anew = f"{submit} name=far", f"{submit} name=NEW checkpoint.resume=runs/far optim.lr=0.5"
    for words, command in (
        (["resume", "far"], again),
        (["resume", "far", *changed], anew),
        (["run", *job, "hardware=h100"], "colotrain submit` with the same arguments"),
    ):
        capsys.readouterr()
        assert guarded(words) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
        assert line.startswith("error: cluster.device=cuda: expected a GPU")
        assert command in line
    for command in (again, anew):
        assert guarded(command.split()[1:]) == 0, capsys.readouterr().err
