"""A plain list of hosts, reached by ssh: colotrain's own launcher is started on each of them.

The hosts see the run's folder, as the nodes of other schedulers do. ssh is the user's own, with its
configuration, keys and known hosts; it never asks for anything, and never trusts an unknown host.
A host records in the run's folder that its launcher runs, and with which exit code it ended.
"""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from colotrain.errors import ColotrainError, ConfigError, Problem, UsageError
from colotrain.rundir import RunDir, read_text
from colotrain.schedulers import commands
from colotrain.schedulers.job import OVER, PORTS, Answers, Job, JobState, Submitted
from colotrain.spec import exit_codes

LABEL = "the hosts"
KEY = "cluster.hosts.names"
JOB_ID = r"\d{8}-\d{6}-[0-9a-f]{4}"
CONNECT_S = 10
"""Seconds in which a host must accept a connection."""
UNSEEN = 66
"""Exit code of a host that does not see the script."""
END_S = 20
"""Seconds between the signals that ask a launcher to end and that end it."""
MOST_AT_ONCE = 32
UNKNOWN = "UNKNOWN"
"""State of a launcher whose host is not reached: it may be training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts on which `colotrain submit` starts a launcher each, by ssh."""

    names: list[str] = field(default_factory=list)
    """Hosts as ssh knows them (`node-a`, `me@10.0.0.2`), node 0 first."""
    address: str | None = None
    """Address at which the others reach node 0; null: the one that ssh uses."""
    port: int | None = None
    """Port of node 0; null: one between 20000 and 29999."""
    gpus_per_node: int | None = None
    """GPUs of each host: one rank each, unless `cluster.procs_per_node` is set; null: as many as
    this machine has."""
    cpus_per_task: int | None = None
    """CPUs of each host that the ranks share; null: as many as this machine has."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run first, unquoted: `export NCCL_DEBUG=WARN`."""
    container: list[str] = field(default_factory=list)
    """Words before the command on each host: `[apptainer, exec, --nv, image.sif]`."""
    python: str | None = None
    """Python interpreter on the hosts; null: the one that submits."""
    snapshot: bool = False
    """Run from a copy of the git working tree, so that later edits do not affect the run."""


def check(settings: Hosts) -> Iterator[Problem]:
    for name in settings.names:
        if not re.fullmatch(r"[\w.][\w.@:%-]*", name, re.ASCII):
            expected, fix = "a host as in `ssh HOST`", "give it a name in ~/.ssh/config"
            yield Problem(key=KEY, value=repr(name), expected=expected, fix=fix)
    if len(set(settings.names)) < len(settings.names):
        yield Problem(key=KEY, value=settings.names, expected="each host once", fix="correct it")
    for name, value in (("port", settings.port), ("gpus_per_node", settings.gpus_per_node)):
        most = 65535 if name == "port" else 1024
        if value is not None and not 1 <= value <= most:
            key, expected = f"cluster.hosts.{name}", f"a number from 1 to {most}"
            yield Problem(key=key, value=value, expected=expected, fix="correct it")
    if settings.address is not None and not re.fullmatch(r"[\w.:%-]+", settings.address, re.ASCII):
        key, expected = "cluster.hosts.address", "an address or a host name"
        yield Problem(key=key, value=repr(settings.address), expected=expected, fix="correct it")


def render(job: Job, settings: Hosts) -> str:
    """Return the script that each host runs, with its node rank, the address of node 0 and an id.

    Raises `ConfigError` unless there is a host for each node.
    """
    if len(settings.names) != job.nodes:
        expected = f"{len(settings.names)}, the number of hosts in {KEY}"
        if not settings.names:
            expected = f"hosts in {KEY}, as in cluster.hosts.names=[node-a,node-b]"
        raise ConfigError([Problem(key="cluster.nodes", value=job.nodes, expected=expected)])
    (run,) = job.runs
    words = [*settings.container, job.python, "-m", "colotrain", "node", "--trust-code", run]
    lines = [
        "#!/bin/sh",
        "# colotrain submit runs this on each host by ssh: sh job.sh NODE_RANK HEAD JOB",
        *(f"# node {rank}: {name}" for rank, name in enumerate(settings.names)),
        "rank=$1 head=$2 COLOTRAIN_JOB=$3",
        "export COLOTRAIN_JOB",
        f"state={shlex.quote(str(RunDir(run).hosts))}/$rank",
        'say() { echo "$COLOTRAIN_JOB $*" >"$state.new" && mv "$state.new" "$state"; }',
        "trap : HUP INT TERM  # which the launcher gets too: it saves and ends",
        'say "running $$"',
        f"cd -- {shlex.quote(job.cwd)} || {{ say 'ended 1'; exit 1; }}",
        *settings.setup,
        f'{shlex.join(words)} --head "$head" --node-rank "$rank"',
        "rc=$?",
        'say "ended $rc"',
        "exit $rc",
    ]
    return "\n".join(lines) + "\n"


# -- ssh


def _ssh(host: str, script: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script on a host; raise `ColotrainError` if the host is not reached."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "--", host, "sh -s"]
    try:
        done = commands.run(words, label=host, text=script, timeout_s=CONNECT_S + timeout_s)
    except commands.NotInstalled as error:
        raise UsageError("ssh: the command is not here", "install an ssh client") from error
    if done.returncode == 255:  # ssh's own
        fix = f"try `ssh {host}`, which has to work without a question"
        raise ColotrainError(f"{host} is not reached: {commands.said(done)}", fix)
    return done


def _on_all(work: Callable[[int, str], str], names: Sequence[str]) -> list[str]:
    """Return what `work` says of each host, all at once; raise `ConfigError` with all failures."""
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        futures = [pool.submit(work, rank, name) for rank, name in enumerate(names)]
    errors = [(names[i], e) for i, f in enumerate(futures) if (e := f.exception())]
    for _, error in errors:
        if not isinstance(error, ColotrainError) or isinstance(error, UsageError):
            raise error
    if errors:
        problems = [
            Problem(key=KEY, value=name, expected=f"a host of the run, but {error}")
            for name, error in errors
        ]
        raise ConfigError(problems)
    return [future.result() for future in futures]


def test(script: str, settings: Hosts) -> str:
    """Check that each host answers and can run colotrain; raise `ConfigError` with all problems."""
    found = re.search(r"^(.* -m colotrain) node --trust-code ", script, re.M)
    assert found is not None
    probe = f"{found[1]} --version >/dev/null"
    setup = "\n".join(settings.setup)

    def work(rank: int, host: str) -> str:
        done = _ssh(host, f"{setup}\n{probe}\n", timeout_s=60)
        if done.returncode:
            raise ColotrainError(f"it cannot run colotrain: {commands.said(done)}")
        return host

    return f"{', '.join(_on_all(work, settings.names))}: reached by ssh"


def submit(script_file: str, settings: Hosts) -> str:
    """Start the script on each host, in a session of its own; return the job's id."""
    rundir = RunDir(Path(script_file).parent)
    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    rundir.make_folder(rundir.hosts)
    port = settings.port or PORTS[0] + zlib.crc32(job.encode()) % PORTS[1]
    address = settings.address or _address(settings.names[0])
    head = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    script = shlex.quote(script_file)

    def start(rank: int, host: str) -> str:
        log = shlex.quote(str(rundir.job_log(job, node=rank)))
        given = shlex.join([str(rank), head, job])
        state = shlex.quote(str(rundir.hosts / str(rank)))
        text = f"[ -r {script} ] || exit {UNSEEN}\n"
        text += f"setsid sh {script} {given} </dev/null >>{log} 2>&1 &\n"
        begun = f"grep -qsFe {shlex.quote(job)} -- {state}"
        text += f"for i in 1 2 3 4 5; do {begun} && exit; sleep 1; done; exit 1\n"
        done = _ssh(host, text, timeout_s=commands.ASK_S)
        if done.returncode == UNSEEN:
            raise ColotrainError(f"it does not see {script_file}: ./runs has to be a shared folder")
        if done.returncode:
            raise ColotrainError(f"it does not start the launcher: {commands.said(done)}")
        return host

    try:
        _on_all(start, settings.names)
    except ColotrainError:
        _end(rundir, job, settings)
        raise
    return job


def _address(host: str) -> str:
    """Return the address that ssh connects to for a host, by the user's configuration."""
    done = commands.run(["ssh", "-G", "--", host], label=host)
    found = re.search(r"^hostname (\S+)$", done.stdout, re.M)
    return found[1] if found else host.rpartition("@")[2]


# -- what became of it


def _told(rundir: RunDir, job: str, rank: int) -> tuple[str, int]:
    """Return what a host recorded: ("running", process id), ("ended", exit code), or ("", 0)."""
    try:
        its, word, number = read_text(rundir.hosts / str(rank), rundir.open).split()
        is_own = its == job and number.isdecimal() and (word == "ended" or int(number) > 1)
        return (word, int(number)) if is_own else ("", 0)
    except (OSError, ValueError):
        return "", 0


def ask(jobs: Sequence[Submitted]) -> Answers:
    """Return the states of jobs; hosts that have not recorded an end are asked."""
    answers = Answers()
    for job in jobs:
        answers.states[job.job] = _state(job)
    return answers


def _state(job: Submitted) -> JobState:
    names = job.section(Hosts).names
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        looked = list(pool.map(lambda rank: _look(job, names[rank], rank), range(len(names))))
    words = [word for word, _ in looked]
    reason = ", ".join(
        f"{name} {what}" for name, (_, what) in zip(names, looked, strict=True) if what
    )
    order = ("RUNNING", "PENDING", "NODE_FAIL", "FAILED", "PREEMPTED", "COMPLETED")
    state = next((word for word in order if word in words), UNKNOWN)
    if UNKNOWN in words and state in OVER:  # the others have ended because of it
        state = "NODE_FAIL"
    return JobState(state=state, reason=reason, asked="ssh")


def _look(job: Submitted, host: str, rank: int) -> tuple[str, str]:
    """Return the state of a host's launcher, and what is wrong with it."""
    rundir = RunDir(Path(job.script).parent)
    word, number = _told(rundir, job.job, rank)
    if word == "running":
        try:
            gone = _ssh(host, _is_there(job.job, number), timeout_s=CONNECT_S).returncode
        except ColotrainError as error:
            return UNKNOWN, error.problem.removeprefix(f"{host} ")
        if not gone:
            return "RUNNING", ""
        word, number = _told(rundir, job.job, rank)  # it may have ended since
    if word == "ended":
        known = {exit_codes.DONE: "COMPLETED", exit_codes.PREEMPTED: "PREEMPTED"}
        return known.get(number, "FAILED"), f"exit code {number}" if number not in known else ""
    return ("NODE_FAIL", "has lost its launcher") if word else ("PENDING", "has not started")


def _is_there(job: str, pid: int) -> str:
    """Return a shell line that exits unless the process with this id is the job's script."""
    return f"case $(ps -o args= -p {pid:d}) in *{shlex.quote(job)}*) ;; *) exit 1 ;; esac\n"


def cancel(job: Submitted) -> None:
    """Ask the launchers to save and end, and end them after `END_S` seconds."""
    _end(RunDir(Path(job.script).parent), job.job, job.section(Hosts))


def _end(rundir: RunDir, job: str, settings: Hosts) -> None:
    def work(rank: int, host: str) -> str:
        word, pid = _told(rundir, job, rank)
        if word != "running":
            return ""
        text = _is_there(job, pid) + f"kill -TERM -- -{pid:d}; i=0\n"
        text += f"while kill -0 {pid:d} 2>/dev/null && [ $i -lt {END_S} ]; do sleep 1; "
        text += f"i=$((i + 1)); done\nkill -KILL -- -{pid:d} 2>/dev/null; exit 0\n"
        try:
            _ssh(host, text, timeout_s=END_S + CONNECT_S)
        except ColotrainError as error:
            return str(error)
        return ""

    failed = [said for said in _on_all(work, settings.names) if said]
    if failed:
        raise ColotrainError("; ".join(failed), "end colotrain there by hand")


def log_command(job: Submitted, *, lines: int, follow: bool) -> list[str] | None:
    """Return None: the logs are in the run's folder."""
    return None


def asked_gpus(settings: Hosts) -> tuple[str, int]:
    """Return the number of GPUs of each host; ssh does not tell their type."""
    number = settings.gpus_per_node
    return "", number if isinstance(number, int) else 0
