"""Jobs of Kubernetes, SkyPilot, dstack and plain hosts: the same text for the same settings, legal
names whatever a run is called, no secret's value, and no value that is read as something else."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from colotrain.cli.main import guarded
from colotrain.config.checks import check
from colotrain.config.schema import Config, Model
from colotrain.config.schema_cluster import Cluster
from colotrain.errors import ConfigError
from colotrain.rundir import RunDir
from colotrain.schedulers import kubernetes
from colotrain.schedulers.dstack import Dstack
from colotrain.schedulers.elsewhere import NAME_LENGTH, legal_name
from colotrain.schedulers.hosts import Hosts
from colotrain.schedulers.job import Job
from colotrain.schedulers.kubernetes import Kubernetes
from colotrain.schedulers.registry import SCHEDULERS
from colotrain.schedulers.skypilot import SkyPilot

GOLDEN = Path(__file__).parents[1] / "golden"
JOB = Job(
    name="llm-1b",
    nodes=2,
    runs=("/shared/runs/llm-1b",),
    logs="/home/me/runs/llm-1b/logs",
    cwd="/home/me",
    python="python",
    owner="me@desk",
    files={"/home/me/runs/llm-1b/plan.json": "{}\n", "/home/me/runs/llm-1b/config.yaml": "{}\n"},
)
SHARED: dict[str, Any] = {
    "image": "registry.example.org/me/train:1",
    "volumes": {"training": "/shared"},
    "env": {"NCCL_DEBUG": "WARN"},
}
TABLE: dict[str, Any] = {
    "kubernetes": Kubernetes(
        **SHARED,
        gpus_per_node=8,
        cpus_per_task=64,
        memory="512Gi",
        secrets={"HF_TOKEN": "hf/token"},
        namespace="team-a",
        node_selector={"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        labels={"kueue.x-k8s.io/queue-name": "team"},
        service_account="trainer",
        image_pull_secret="registry",
    ),
    "trainjob": Kubernetes(
        **SHARED, kind="trainjob", gpus_per_node=8, secrets={"HF_TOKEN": "hf/token"}
    ),
    "skypilot": SkyPilot(
        **SHARED,
        gpus_per_node="H100:8",
        cpus_per_task=64,
        memory="200",
        infra="aws/us-east-1",
        use_spot=True,
        secrets={"HF_TOKEN": ""},
    ),
    "dstack": Dstack(
        **SHARED,
        gpus_per_node="H100:8",
        memory="256GB",
        secrets={"HF_TOKEN": "hf_token"},
        fleets=["big"],
        spot_policy="auto",
    ),
    "hosts": Hosts(names=["node-a", "me@10.0.0.2"], setup=["export NCCL_DEBUG=WARN"]),
}
NASTY = [
    *("$(touch HURT)", "`touch HURT`", "'; touch HURT; '", '"; touch HURT; "', "a\nb: c", "\\"),
    *("$(JOB_COMPLETION_INDEX)", "$$(HOME)", "${{ secrets.x }}", "{a: b}", "- a", "& *x", "!!str"),
    *("Ünïcödé", "中文", "A" * 300, "--help", "", " ", "null", "1e3", "yes", "\x00\x1b[0m", "é∂"),
]


def render(name: str, job: Job = JOB, **changed: Any) -> str:
    settings = replace(TABLE[name], **changed)
    row = next(s for s in SCHEDULERS.values() if s.settings is type(settings))
    return row.render(job, settings)


@pytest.mark.parametrize("name", TABLE)
def test_the_text_of_a_job(name: str) -> None:
    """Compare with `tests/unit/golden/NAME.job`, and read a change before it is accepted."""
    assert render(name) == (GOLDEN / f"{name}.job").read_text("utf-8")


def test_skypilot_itself_reads_the_task() -> None:
    """Where SkyPilot is installed: against its published schemas, and with its own parser."""
    sky = pytest.importorskip("sky")
    jsonschema = pytest.importorskip("jsonschema")
    from sky.utils import schemas

    (task,) = yaml.safe_load_all(render("skypilot"))
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "nodes": 2}, schemas.get_task_schema())
    read = sky.Task.from_yaml_config(task, secrets_overrides=[("HF_TOKEN", "a value")])
    assert read.num_nodes == 2
    (resources,) = read.resources
    assert resources.accelerators == {"H100": 8}
    assert resources.use_spot


def test_the_objects_of_a_job_name_one_another() -> None:
    plan, policy, service, job = yaml.safe_load_all(render("kubernetes"))
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert {o["metadata"]["name"] for o in (plan, policy, service)} == {name}
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    (container,) = pod["containers"]
    assert container["command"][-5] == f"{name}-0.{name}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert plan["data"] == {"plan.json": "{}\n", "config.yaml": "{}\n"}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2


def test_names_are_legal_and_differ_whatever_runs_are_called() -> None:
    draw = random.Random(0)
    texts = NASTY + ["".join(draw.choices(NASTY, k=3)) for _ in range(40)]
    found = {}
    for index, text in enumerate(texts):
        job = replace(JOB, name=text, logs=f"/runs/{index}/logs")
        name = found[index] = legal_name(job)
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name), text
        assert len(name) <= NAME_LENGTH
        for document in yaml.safe_load_all(render("kubernetes", job)):
            assert document["metadata"]["name"] == name
    assert len(set(found.values())) == len(texts)
    assert legal_name(JOB) != legal_name(replace(JOB, owner="you@desk"))


def expanded(text: str, variables: dict[str, str]) -> str:
    """`text` as Kubernetes expands a container's words: `$(NAME)` if known, `$$` is a dollar."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]),
        text,
    )


@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_a_folder_arrives_as_it_is_called(text: str, tmp_path: Path) -> None:
    """On its way through YAML, then Kubernetes' expansion or the shell of SkyPilot and dstack."""
    job = replace(JOB, runs=(f"/shared/runs/{text}",))
    *_, manifest = yaml.safe_load_all(render("kubernetes", job))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    words = [expanded(w, {"JOB_COMPLETION_INDEX": "1"}) for w in container["command"]]
    assert words[5] == job.runs[0]
    assert words[-3] == "1"
    if "\x00" in text:
        return
    (task,) = yaml.safe_load_all(render("skypilot", job))
    lines = [task["run"].replace("exec python", "printf '%s\\0' python")]
    if "${{" in text:
        with pytest.raises(ConfigError):
            render("dstack", job)
    else:
        (task,) = yaml.safe_load_all(render("dstack", job))
        lines += [f"printf '%s\\0' {line}" for line in task["commands"]]
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, cwd=tmp_path, timeout=20, check=True
        )
        assert done.stdout.decode().split("\0")[5] == job.runs[0]
    assert list(tmp_path.iterdir()) == []


def test_the_words_on_hosts_are_what_was_meant(tmp_path: Path) -> None:
    for text in (t for t in NASTY if t and "\x00" not in t):
        job = replace(JOB, runs=(f"/runs/{text}",), cwd=str(tmp_path))
        line = next(x for x in render("hosts", job).split("\ncd -- ") if " -m colotrain" in x)
        words = shlex.split(line)
        assert job.runs[0] in words
        subprocess.run(["sh", "-n"], input=render("hosts", job), text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("section", "settings", "key"),
    [
        ("kubernetes", Kubernetes(namespace="Team_A"), "namespace"),
        ("kubernetes", Kubernetes(namespace="a\nb"), "namespace"),
        ("kubernetes", Kubernetes(volumes={"x\ny": "/shared"}), "volumes"),
        ("kubernetes", Kubernetes(volumes={"x": "../etc"}), "volumes.x"),
        ("kubernetes", Kubernetes(secrets={"HF_TOKEN": "hf_abcdef"}), "secrets.HF_TOKEN"),
        ("kubernetes", Kubernetes(env={"HF_TOKEN": "hf_abcdef"}), "env.HF_TOKEN"),
        ("kubernetes", Kubernetes(env={"A B": "x"}), "env"),
        ("kubernetes", Kubernetes(labels={"a": "ü"}), "labels"),
        ("kubernetes", Kubernetes(memory="much"), "memory"),
        ("kubernetes", Kubernetes(gpus_per_node="many"), "gpus_per_node"),
        ("kubernetes", Kubernetes(gpus_per_node="H100:8"), "gpus_per_node"),
        ("skypilot", SkyPilot(gpus_per_node=8), "gpus_per_node"),
        ("dstack", Dstack(secrets={"A": "a }} b"}), "secrets.A"),
        ("hosts", Hosts(names=["-oProxyCommand=touch HURT"]), "names"),
        ("hosts", Hosts(names=["a\nb"]), "names"),
        ("hosts", Hosts(names=["a", "a"]), "names"),
        ("hosts", Hosts(port=0), "port"),
        ("hosts", Hosts(address="a b"), "address"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused_in_one_line(
    section: str, settings: Any, key: str
) -> None:
    config = Config(model=Model(target="a.b:c"), cluster=replace(Cluster(), **{section: settings}))
    found = [p for p in check(config, is_whole=True) if p.key.startswith("cluster.")]
    assert f"cluster.{section}.{key}" in [problem.key for problem in found]
    assert all("\n" not in str(problem) for problem in found)
    assert not any("hf_abcdef" in str(p) for p in found if ".env." in p.key)


# -- submit, runs, logs and stop with stand-ins for kubectl

TINY = (
    *("recipe=llm-tiny", "plugin=zero2", "cluster=kubernetes", "cluster.procs_per_node=1"),
    *("cluster.kubernetes.image=me/x:1", "cluster.kubernetes.volumes={training: /shared}"),
)
KUBECTL = """\
echo "$@" >> "$LOG"
case "$*" in
  *apply*) cat > applied.yaml; echo applied;;
  *delete*) ;;
  *logs*) echo "[pod/x] step 3";;
  *get*) cat state.json;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that records how it was called; the current folder is beside it."""
    for folder in ("bin", "work"):
        (tmp_path / folder).mkdir()
    command = tmp_path / "bin" / "kubectl"
    command.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\nLOG={tmp_path}/calls\n{KUBECTL}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def is_running(name: str) -> None:
    labels = {"app.kubernetes.io/instance": name}
    job = {"kind": "Job", "metadata": {"labels": labels}, "status": {"active": 1, "ready": 1}}
    Path("state.json").write_text(json.dumps({"items": [job]}))


def test_a_job_of_kubernetes_is_submitted_listed_shown_and_ended(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["submit", *TINY, "name=far", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    applied = Path("applied.yaml").read_text()
    assert applied == RunDir("runs/far").job_script("yaml").read_text()
    name = next(yaml.safe_load_all(applied))["metadata"]["name"]
    assert document["job"] == name
    plan = next(yaml.safe_load_all(applied))["data"]["plan.json"]
    assert json.loads(plan)["cluster"]["threads_set_by"] == ""  # pods have another environment
    assert json.loads(plan) == json.loads(RunDir("runs/far").plan_file.read_text())

    is_running(name)
    assert guarded(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["job"], row["job_state"]) == ("running", name, "RUNNING")
    assert guarded(["submit", *TINY, "name=far"]) == 2
    assert guarded(["resume", "far"]) == 2
    assert "its files are on the nodes" in capsys.readouterr().err
    assert guarded(["logs", "far"]) == 0
    assert capsys.readouterr().out == "[pod/x] step 3\n"
    RunDir("runs/far").job_script("yaml").write_text("kind: Namespace\nmetadata: {name: all}\n")
    assert guarded(["stop", "far"]) == 0
    calls = (kubectl / "calls").read_text()
    verbs = [line.partition(" -- ")[2] or line for line in calls.splitlines()]
    assert verbs[:3] == ["apply --dry-run=server -f -", f"job.batch/{name}", "apply -f -"]
    assert verbs[-2:] == [
        f"job.batch/{name}",
        f"configmap/{name} service/{name} networkpolicy.networking.k8s.io/{name}",
    ]
    assert "apply --dry-run=server" in calls
    assert f"app.kubernetes.io/instance={name}" in calls


FORBIDDEN = """\
echo 'configmap/far configured'
echo 'Error from server (Forbidden): networkpolicies.networking.k8s.io "far" is forbidden: User \
"me" cannot VERB resource "networkpolicies" in API group "networking.k8s.io"' >&2
exit 1
"""


def test_an_account_without_rights_on_network_policies_is_told_what_to_set(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = kubectl / "bin" / "kubectl"
    allowed = command.read_text()
    told = "cluster.kubernetes.network_policy=false"
    command.write_text(f"{allowed.partition('echo')[0]}{FORBIDDEN}")
    assert guarded(["submit", *TINY, "name=far"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("runs").exists()
    command.write_text(allowed)
    assert guarded(["submit", *TINY, "name=far", "--json"]) == 0
    is_running(json.loads(capsys.readouterr().out)["job"])
    command.write_text(allowed.replace("*delete*) ;;", f"*delete*policy*) {FORBIDDEN};;"))
    assert guarded(["stop", "far"]) == 1
    assert told in capsys.readouterr().err


def test_a_path_that_no_volume_of_the_job_has_is_told(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("here", "shared"):
        (kubectl / folder).mkdir()
        (kubectl / folder / "a.txt").write_text("some text " * 2000)
    volumes = f"cluster.kubernetes.volumes={{training: /shared, data: {kubectl}/shared}}"
    for folder, told in (("here", True), ("shared", False)):
        words = [f"data.path={kubectl}/{folder}/a.txt", volumes, "name=far", "--dry-run"]
        assert guarded(["submit", *TINY, *words]) == 0
        line = f"data.path={kubectl}/{folder}/a.txt: is in none of the job's volumes"
        assert (line in capsys.readouterr().err) == told


def test_without_kubectl_the_job_is_printed_and_nothing_written(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kubectl / "bin" / "kubectl").unlink()
    assert guarded(["submit", *TINY, "name=far"]) == 2
    printed = capsys.readouterr()
    kinds = [document["kind"] for document in yaml.safe_load_all(printed.out)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "Service", "Job"]
    assert "nothing is submitted" in printed.err
    assert not Path("runs").exists()


def test_what_a_job_lacks_is_said_at_once(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["submit", *TINY[:4], "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].split(":")[0] for line in lines if "error" in line] == [
        " cluster.kubernetes.image",
        " cluster.kubernetes.volumes",
    ]
    assert guarded(["submit", *TINY, "--sweep", "train.seed=1,2", "--dry-run"]) == 2
    assert "--sweep: Kubernetes has no job arrays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "pods", "state", "reason"),
    [
        ({}, [], "PENDING", ""),
        (
            {"active": 1},
            [
                {
                    "status": {
                        "conditions": [
                            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                        ]
                    }
                }
            ],
            "PENDING",
            "Unschedulable",
        ),
        (
            {"active": 1},
            [
                {
                    "status": {
                        "containerStatuses": [
                            {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
                        ]
                    }
                }
            ],
            "PENDING",
            "ImagePullBackOff",
        ),
        ({"active": 2, "ready": 1}, [], "RUNNING", ""),
        ({"jobsStatus": [{"name": "node", "ready": 1}]}, [], "RUNNING", ""),
        (
            {"conditions": [{"type": "Complete", "status": "True"}]},
            [],
            "COMPLETED",
            "",
        ),
        (
            {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]},
            [],
            "FAILED",
            "PodFailurePolicy",
        ),
    ],
)
def test_the_state_of_a_job_of_kubernetes(
    status: dict[str, Any], pods: list[dict[str, Any]], state: str, reason: str
) -> None:
    found = kubernetes.state_of(status, pods)
    assert (found.state, found.reason) == (state, reason)
