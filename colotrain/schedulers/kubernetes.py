"""Kubernetes: a job's manifest, and the `kubectl` commands that submit, ask, show and end it.

A run is an Indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer. Its plan is in a
ConfigMap, its run directory on persistent volumes. Pods that save and exit, because they were
evicted, are replaced, and the run goes on from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from subprocess import CompletedProcess
from typing import Any, Literal

from colotrain.errors import ColotrainError, Problem, UsageError
from colotrain.schedulers import commands, elsewhere
from colotrain.schedulers.elsewhere import Elsewhere, without_empty
from colotrain.schedulers.job import Answers, Job, JobState, Submitted
from colotrain.spec import exit_codes

LABEL = "Kubernetes"
LABEL_RE = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
NAME_RE = rf"{LABEL_RE}(\.{LABEL_RE})*"
EXPECTED = "a name of lower-case letters, digits, `-` and `.` (RFC 1123)"
QUANTITY = r"\d+(\.\d+)?([KMGTPE]i?|[mk])?"
INSTANCE = "app.kubernetes.io/instance"
JOB_SET = "jobset.sigs.k8s.io/jobset-name"
"""Label of the pods of a TrainJob, whose JobSet has its name."""
PLAN_FOLDER = "/etc/colotrain"
MOST_CARRIED = 900_000
"""Bytes of plan and configuration: a ConfigMap holds 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes(Elsewhere):
    """The job that `colotrain submit` hands to Kubernetes. `volumes` names persistent volume
    claims, `secrets` writes `{HF_TOKEN: SECRET/KEY}`."""

    kind: Literal["job", "trainjob"] = "job"
    """An Indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer."""
    context: str | None = None
    """Context of kubectl; null: the current one."""
    namespace: str | None = None
    """Namespace; null: that of the context."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name under which nodes offer GPUs."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm, which counts as memory of the pod."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    """Taints of nodes that do not matter."""
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels of the job: `{kueue.x-k8s.io/queue-name: team}`."""
    service_account: str | None = None
    """Service account of the pods."""
    image_pull_secret: str | None = None
    """Name of the Secret with which the image is pulled."""
    runtime: str = "torch-distributed"
    """TrainJob: the ClusterTrainingRuntime, whose container must be called `node`."""
    network_policy: bool = True
    """Whether pods may be reached by those of the same job alone, where the cluster's network
    heeds NetworkPolicies."""
    grace_s: int = 300
    """Seconds in which pods that are asked to end can save."""
    max_requeues: int = 6
    """Job: how often nodes that failed are replaced; those that were evicted do not count."""


def check(settings: Kubernetes) -> Iterator[Problem]:
    """Yield settings that the API would refuse."""
    section = "cluster.kubernetes"
    yield from elsewhere.check(section, settings)
    for name in ("namespace", "service_account", "image_pull_secret", "runtime"):
        value = getattr(settings, name)
        if value is not None:
            yield from elsewhere.check_match(f"{section}.{name}", value, NAME_RE, EXPECTED)
    for claim in settings.volumes:
        yield from elsewhere.check_match(f"{section}.volumes", claim, NAME_RE, EXPECTED)
    for name, kept in settings.secrets.items():
        expected = "SECRET/KEY: the name of a Secret and a key in it"
        pattern = rf"{NAME_RE}/[A-Za-z0-9._-]+"
        yield from elsewhere.check_match(f"{section}.secrets.{name}", kept, pattern, expected)
    for name in ("memory", "shared_memory"):
        value = getattr(settings, name)
        if value is not None:
            expected = "a quantity such as 64Gi"
            yield from elsewhere.check_match(f"{section}.{name}", value, QUANTITY, expected)
    for key, value in (*settings.labels.items(), *settings.node_selector.items()):
        expected, pattern = "a label's key and value", r"[\w./-]{1,317}=(\w([\w.-]{0,61}\w)?)?"
        text = f"{key}={value}"
        if not text.isascii() or not text.isprintable():
            pattern = "(?!)"
        yield from elsewhere.check_match(f"{section}.labels", text, pattern, expected)
    gpu_type, _ = elsewhere.rank_gpus(settings)
    if gpu_type and not settings.node_selector:
        expected = f"{section}.node_selector beside a type: a pod asks for a number of GPUs alone"
        fix = f"for example {section}.node_selector={{nvidia.com/gpu.product: NVIDIA-{gpu_type}}}"
        key, given = f"{section}.gpus_per_node", settings.gpus_per_node
        yield Problem(key=key, value=given, expected=expected, fix=fix)
    for name in ("grace_s", "max_requeues"):
        if getattr(settings, name) < 0:
            key, value = f"{section}.{name}", getattr(settings, name)
            yield Problem(key=key, value=value, expected="0 or more", fix="correct it")


def render(job: Job, settings: Kubernetes) -> str:
    """Return the manifest: the plan as a ConfigMap, and the objects that run it."""
    elsewhere.check_complete("cluster.kubernetes", settings)
    name = elsewhere.legal_name(job)
    files = {PurePosixPath(path).name: text for path, text in job.files.items()}
    if (size := sum(len(text.encode()) for text in files.values())) > MOST_CARRIED:
        problem = f"the plan has {size} bytes, more than the {MOST_CARRIED} of a ConfigMap"
        raise UsageError(problem, "name fewer values in the configuration")
    plan = _object("v1", "ConfigMap", name, settings, {"data": files})
    objects = [plan]
    if settings.network_policy:
        objects.append(_network_policy(name, settings))
    if settings.kind == "trainjob":
        return elsewhere.to_yaml(*objects, _train_job(job, name, settings))
    return elsewhere.to_yaml(*objects, _service(name, settings), _job(job, name, settings))


def _object(
    version: str, kind: str, name: str, settings: Kubernetes, content: dict[str, Any]
) -> dict[str, Any]:
    about = {"name": name, "namespace": settings.namespace, "labels": _labels(name, settings)}
    return {"apiVersion": version, "kind": kind, "metadata": without_empty(about), **content}


def _labels(name: str, settings: Kubernetes) -> dict[str, str]:
    return {**settings.labels, "app.kubernetes.io/name": "colotrain", INSTANCE: name}


def _network_policy(name: str, settings: Kubernetes) -> dict[str, Any]:
    """Return what keeps other pods from the ports of torch, which ask nobody for a proof."""
    label = INSTANCE if settings.kind == "job" else JOB_SET
    pods = {"podSelector": {"matchLabels": {label: name}}}
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, settings, {"spec": spec})


def _service(name: str, settings: Kubernetes) -> dict[str, Any]:
    """Return the Service that gives pods names, also those that are not ready yet."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: name},
        "ports": [{"name": "rendezvous", "port": elsewhere.PORT}],
    }
    return _object("v1", "Service", name, settings, {"spec": spec})


def _job(job: Job, name: str, settings: Kubernetes) -> dict[str, Any]:
    """Return an Indexed Job: a pod for each node, whose index is its node rank."""
    head = f"{name}-0.{name}:{elsewhere.PORT}"
    container = _container(job, settings, name, head=head, rank="$(JOB_COMPLETION_INDEX)")
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        **_pod(name, settings),
    }
    codes: dict[str, Any] = {"containerName": "node", "operator": "In"}
    final = [exit_codes.USAGE, exit_codes.DOES_NOT_FIT]
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": final}},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [exit_codes.PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": settings.max_requeues * job.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(name, settings)}, "spec": pod},
    }
    return _object("batch/v1", "Job", name, settings, {"spec": spec})


def _train_job(job: Job, name: str, settings: Kubernetes) -> dict[str, Any]:
    """Return a TrainJob; its runtime says which node is which, in torchrun's variables."""
    head, rank = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)", "$(PET_NODE_RANK)"
    container = _container(job, settings, name, head=head, rank=rank)
    mounts = {"name": "node", "volumeMounts": container["volumeMounts"]}
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "numNodes": job.nodes,
        "env": container["env"],
        "resourcesPerNode": container.get("resources"),
    }
    pod = {**_pod(name, settings), "containers": [mounts]}
    nodes = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [nodes]}}}
    spec = {
        "runtimeRef": {"name": settings.runtime},
        "trainer": without_empty(trainer),
        "runtimePatches": [{"manager": "colotrain/submit", "trainingRuntimeSpec": patch}],
    }
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, settings, {"spec": spec})


def _literal(text: str) -> str:
    """Return text that Kubernetes does not expand: `$$` is a dollar sign."""
    return text.replace("$", "$$")


def _container(
    job: Job, settings: Kubernetes, name: str, *, head: str, rank: str
) -> dict[str, Any]:
    """Return the container, whose command expands `$(…)` in `head` and `rank` alone."""
    env: list[dict[str, Any]] = [{"name": "COLOTRAIN_JOB", "value": name}]
    env += [{"name": key, "value": _literal(value)} for key, value in settings.env.items()]
    for key, kept in settings.secrets.items():
        secret, _, inside = kept.partition("/")
        reference = {"secretKeyRef": {"name": secret, "key": inside}}
        env.append({"name": key, "valueFrom": reference})
    _, num_gpus = elsewhere.rank_gpus(settings)
    amounts = {
        "cpu": str(settings.cpus_per_task or ""),
        "memory": settings.memory,
        settings.gpu_resource: str(num_gpus or ""),
    }
    limits = without_empty(amounts)
    mounts = [{"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True}]
    mounts += [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, path in enumerate(settings.volumes.values()):
        mounts.append({"name": f"volume-{index}", "mountPath": path})
    return {
        "name": "node",
        "image": settings.image,
        "command": elsewhere.node_command(
            job, head=head, rank=rank, literal=_literal, carried=PLAN_FOLDER
        ),
        "env": env,
        **({"resources": {"requests": dict(limits), "limits": limits}} if limits else {}),
        "volumeMounts": mounts,
    }


def _pod(name: str, settings: Kubernetes) -> dict[str, Any]:
    """Return the fields that a pod's specification and a TrainJob's patch of it share."""
    shm = {"medium": "Memory", "sizeLimit": settings.shared_memory}
    volumes: list[dict[str, Any]] = [{"name": "plan", "configMap": {"name": name}}]
    volumes += [{"name": "shm", "emptyDir": shm}]
    for index, claim in enumerate(settings.volumes):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}})
    pull = [{"name": settings.image_pull_secret}] if settings.image_pull_secret else []
    given = {
        "volumes": volumes,
        "terminationGracePeriodSeconds": settings.grace_s,
        "nodeSelector": settings.node_selector,
        "tolerations": settings.tolerations,
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": pull,
    }
    return without_empty(given)


# -- kubectl


def _kubectl(settings: Kubernetes) -> list[str]:
    """Return kubectl with its context and namespace; each command is given a bound of its own."""
    context = [f"--context={settings.context}"] if settings.context else []
    namespace = [f"--namespace={settings.namespace}"] if settings.namespace else []
    return ["kubectl", *context, *namespace]


def test(script: str, settings: Kubernetes) -> str:
    """Return what the API says about the manifest without keeping it."""
    words = [*_kubectl(settings), "apply", "--dry-run=server", "-f", "-"]
    done = commands.run(words, label=LABEL, text=script, timeout_s=commands.SUBMIT_S)
    fix = _fix_of(done, "`kubectl auth can-i create jobs` says what you may do")
    return commands.checked(done, what=f"{LABEL} refuses the job", fix=fix).strip()


def submit(script_file: str, settings: Kubernetes) -> str:
    """Apply the manifest, in place of an earlier job of the same run; return the job's name."""
    plan, text = elsewhere.read_job(script_file)
    name = str(plan["metadata"]["name"])
    _delete_job(name, settings)
    words = [*_kubectl(settings), "apply", "-f", "-"]
    done = commands.run(words, label=LABEL, text=text, timeout_s=commands.SUBMIT_S)
    fix = _fix_of(done, f"its manifest is {script_file}")
    commands.checked(done, what=f"{LABEL} refuses the job", fix=fix)
    return name


def cancel(job: Submitted) -> None:
    """End the job's pods, which save first, and take its other objects away after them."""
    settings = job.section(Kubernetes)
    _delete_job(job.job, settings)
    kinds = ["configmap", "service"] if settings.kind == "job" else ["configmap"]
    if settings.network_policy:
        kinds.append("networkpolicy.networking.k8s.io")
    _delete(job.job, settings, *kinds)


def _delete_job(name: str, settings: Kubernetes) -> None:
    """Delete the Job or TrainJob, and wait until its pods have saved and are gone."""
    kinds = {"job": "job.batch", "trainjob": "trainjob.trainer.kubeflow.org"}
    _delete(name, settings, kinds[settings.kind])


def _delete(name: str, settings: Kubernetes, *kinds: str) -> None:
    """Delete objects of `render`, by their kinds and their one name."""
    bound_s = settings.grace_s + commands.ASK_S
    how = ["--ignore-not-found", "--cascade=foreground", f"--timeout={bound_s:.0f}s"]
    words = [*_kubectl(settings), "delete", *how, "--", *(f"{kind}/{name}" for kind in kinds)]
    done = commands.run(words, label=LABEL, timeout_s=bound_s + commands.ASK_S)
    if done.returncode:
        fix = _fix_of(done, "`kubectl get pods` shows what is left")
        raise ColotrainError(f"{LABEL}: {commands.said(done)}", fix)


def _fix_of(done: CompletedProcess[str], otherwise: str) -> str:
    """Return what helps an account that has no right on NetworkPolicies; or `otherwise`."""
    if "networkpolicies" not in done.stderr or "orbidden" not in done.stderr:
        return otherwise
    key = "cluster.kubernetes.network_policy=false"
    return f"ask for the right on networkpolicies, or set {key}: other pods then reach its ports"


def ask(jobs: Sequence[Submitted]) -> Answers:
    """Return the states of jobs, with one question to each namespace."""
    answers = Answers()
    asked: dict[tuple[Any, ...], list[Submitted]] = {}
    for job in jobs:
        its = job.section(Kubernetes)
        asked.setdefault((its.context, its.namespace, its.kind), []).append(job)
    for group in asked.values():
        try:
            answers.states |= _ask(group, group[0].section(Kubernetes))
        except (ColotrainError, ValueError, LookupError, TypeError, AttributeError) as error:
            answers.trouble = answers.trouble or f"{LABEL}: {error}"
    return answers


def _ask(jobs: Sequence[Submitted], settings: Kubernetes) -> dict[str, JobState]:
    what = "jobs.batch,pods"
    if settings.kind == "trainjob":
        what = "trainjobs.trainer.kubeflow.org"
    selector = f"{INSTANCE} in ({','.join(job.job for job in jobs)})"
    words = [*_kubectl(settings), "get", what, "-l", selector, "-o", "json"]
    done = commands.run([*words, "--request-timeout=15s"], label=LABEL)
    items = json.loads(commands.checked(done, what="kubectl", fix="is the cluster reachable?"))
    found = {}
    for job in jobs:
        own = [i for i in items["items"] if i["metadata"]["labels"].get(INSTANCE) == job.job]
        objects = [item for item in own if item["kind"] in ("Job", "TrainJob")]
        if objects:
            pods = [item for item in own if item["kind"] == "Pod"]
            found[job.job] = state_of(objects[0].get("status", {}), pods)
    return found


def state_of(status: dict[str, Any], pods: Iterable[dict[str, Any]] = ()) -> JobState:
    """Return the state of a Job or TrainJob, in the words of other schedulers."""
    for condition in status.get("conditions", []):
        word = {"Complete": "COMPLETED", "Failed": "FAILED", "Suspended": "SUSPENDED"}
        if condition.get("status") == "True" and condition.get("type") in word:
            reason = str(condition.get("reason") or "")
            reason = "" if condition["type"] == "Complete" else reason
            return JobState(state=word[condition["type"]], reason=reason, asked="kubectl")
    its = status.get("jobsStatus", [])
    ready = status.get("ready", 0) or sum(job.get("ready", 0) for job in its)
    reason = next(filter(None, map(_why_pending, pods)), "")
    return JobState(state="RUNNING" if ready else "PENDING", reason=reason, asked="kubectl")


def _why_pending(pod: dict[str, Any]) -> str:
    """Return why a pod does not run: `Unschedulable`, `ImagePullBackOff`; or nothing."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason"):
            return str(waiting["reason"])
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "")
    return ""


def log_command(job: Submitted, *, lines: int, follow: bool) -> list[str]:
    """Return the command that prints what the job's pods print."""
    settings = job.section(Kubernetes)
    label = INSTANCE if settings.kind == "job" else JOB_SET
    how = ["--prefix", f"--tail={lines}", "--max-log-requests=1000", *(["-f"] if follow else [])]
    return [*_kubectl(settings), "logs", "-l", f"{label}={job.job}", *how]


asked_gpus = elsewhere.rank_gpus
