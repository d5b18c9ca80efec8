"""Job script: a pure function of the run and of its `cluster.slurm` section.

Every value from the user becomes either part of an `#SBATCH` line, with SLURM's own quoting, or a
quoted shell word. Only the setup lines are executed as shell code.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from colotrain.errors import UsageError
from colotrain.schedulers.job import PORTS, Job
from colotrain.schedulers.slurm_settings import Slurm


def render(job: Job, slurm: Slurm) -> str:
    """Return the text of the job's script."""
    lines = ["#!/usr/bin/env bash"]
    lines += [f"#SBATCH --{flag}" for flag in flags(job, slurm)]
    return "\n".join([*lines, "", *_settings(job, slurm), _BODY])


def flags(job: Job, slurm: Slurm) -> Iterator[str]:
    """Yield sbatch's flags without their dashes, quoted as sbatch reads them from a script."""
    given: list[tuple[str, Any]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time),
        ("gpus-per-node", slurm.gpus_per_node),
        ("gres", slurm.gres),
        ("cpus-per-task", slurm.cpus_per_task),
        ("mem", slurm.memory),
        ("exclude", slurm.exclude),
        ("nodelist", slurm.nodelist),
        ("dependency", slurm.dependency),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
        ("mail-user", slurm.mail_user),
        ("mail-type", slurm.mail_type),
        ("comment", slurm.comment),
        *((flag, True if value is None else value) for flag, value in slurm.extra.items()),
    ]
    for flag, value in given:
        if value is True:
            yield flag
        elif value is not None and value is not False:
            yield f"{flag}={quote(str(value))}"
    if job.is_array:
        throttle = f"%{job.max_parallel}" if job.max_parallel else ""
        yield f"array=0-{len(job.runs) - 1}{throttle}"
    if "\\" in job.logs:  # a backslash would disable sbatch's %j
        raise UsageError(f"{job.logs}: sbatch takes no log path with a backslash", "run elsewhere")
    pattern = "%A_%a" if job.is_array else "%j"
    yield f"output={quote(job.logs.replace('%', '%%') + f'/job-{pattern}.log')}"
    yield "open-mode=append"
    yield "requeue"
    yield f"signal=B:USR1@{slurm.warn_s}"


def quote(text: str) -> str:
    """Return `text` quoted as one value of an `#SBATCH` line.

    sbatch reads double quotes; a backslash escapes the next character, also inside quotes;
    variables are not expanded. A line break cannot be written.
    """
    if not text.isprintable():
        raise UsageError(f"{text!r}: cannot stand in a job's script", "take the line's end out")
    if text and all(c.isascii() and (c.isalnum() or c in "-_./:,=@%+[]") for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _settings(job: Job, slurm: Slurm) -> Iterator[str]:
    """Yield the lines that differ between jobs; `_BODY` follows them."""
    words = (*slurm.container, job.python, "-m", "colotrain", "node", "--trust-code")
    yield f"runs=({_words(job.runs)})"
    yield f"cd -- {shlex.quote(job.cwd)} || exit 1"
    yield f"command=({_words(words)})"
    step = f"--cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    yield f"step=({step})"
    yield f"most_requeues={slurm.max_requeues}"
    if slurm.setup:
        yield ""
        yield "# cluster.slurm.setup"
        yield from slurm.setup
    yield ""


def _words(texts: Sequence[str]) -> str:
    return " ".join(shlex.quote(text) for text in texts)


_BODY = f"""\
run=${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}
restarts=${{SLURM_RESTART_COUNT:-0}}
id=$SLURM_JOB_ID
say() {{ echo "colotrain: job $id, restart $restarts: $*"; }}
if [ -e "$run/control/finished" ]; then say "the run has finished"; exit 0; fi
if [ -e "$run/control/cancel" ]; then say "the run was stopped"; exit 0; fi

# node 0 is the job's first node, at the address that SLURM itself uses
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)
head=$(scontrol show node "$first" 2>/dev/null | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
head=${{head:-$(hostname)}}
port=$(({PORTS[0]} + (id * 7 + restarts) % {PORTS[1]}))
say "$SLURM_JOB_NUM_NODES node(s), node 0 at $head:$port"

# a warning of the time limit or of preemption: all ranks save after the same step and stop
warned=
warn() {{ warned=$1; say "$1: asking the run to save and stop"; : >"$run/control/stop"; }}
rm -f "$run/control/stop"  # of the run before it was queued again
trap 'warn USR1' USR1
trap 'warn TERM' TERM
srun --kill-on-bad-exit=1 --wait=0 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
  "${{step[@]}}" "${{command[@]}}" "$run" --head "$head:$port" &
until wait $!; rc=$?; [ $rc -eq 0 ] || ! kill -0 $! 2>/dev/null; do :; done
wait $!; rc=$?
say "ended with $rc"

if [ $rc -eq 0 ]; then : >"$run/control/finished"; exit 0; fi
if [ $rc -ne 75 ] && [ -z "$warned" ]; then exit $rc; fi
if [ -e "$run/control/cancel" ]; then say "stopped, not queued again"; exit $rc; fi
case $(scontrol show job "$id" -o 2>/dev/null) in *JobState=CANCELLED*) exit $rc ;; esac
if [ "$restarts" -ge "$most_requeues" ]; then
  say "was queued again $restarts times, which is the most: colotrain resume goes on by hand"
  exit $rc
fi
if [ $rc -eq 75 ]; then say "saved; queued again"
else say "queued again: goes on from the newest checkpoint that is whole"; fi
if scontrol show config 2>/dev/null | grep -Eq '^RequeueExit .*\\b85\\b'; then exit 85; fi
scontrol requeue "$id" && sleep 60  # which ends this script
exit $rc
"""
