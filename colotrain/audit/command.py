"""Running somebody's command under observation, in a run directory of its own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colotrain.errors import UsageError
from colotrain.events import liveness
from colotrain.events.kinds import LaunchEnded, LaunchStarted
from colotrain.events.log import EventWriter
from colotrain.rundir import RUNS, RunDir, run_name
from colotrain.spec.elastic import ElasticPlan
from colotrain.spec.exit_codes import signal_name
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.observing import ObservePlan
from colotrain.spec.plan import (
    BatchPlan,
    CheckpointPlan,
    ClusterPlan,
    DataPlan,
    FreezePlan,
    ModelPlan,
    OptimPlan,
    ParameterCounts,
    PluginPlan,
    RunPlan,
    TrainPlan,
)

START = Path(__file__).parent / "start"
OBSERVED = "observed"
"""Name of the plugin in the plan of an audited command: nothing of it was resolved here."""


def new_rundir(command: Sequence[str], name: str) -> RunDir:
    """Return the folder of this audit; without a `name`, the first that is free."""
    if name:
        if (rundir := RunDir(RUNS / run_name(name))).plan_file.exists():
            raise UsageError(f"--name {name}: {rundir.path} exists", "choose another name")
        return rundir
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    stem = f"audit-{run_name((scripts or [Path(command[0]).name])[0])}"
    number = 1
    while (RUNS / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return RunDir(RUNS / (stem if number == 1 else f"{stem}-{number}"))


def plan_of(command: Sequence[str], rundir: RunDir, *, steps: int) -> RunPlan:
    """Return the plan of an audited command: its name, and blanks for what nobody resolved."""
    text = shlex.join(command)
    return RunPlan(
        name=rundir.name,
        recipe=None,
        world_size=1,
        plugin=PluginPlan(
            name=OBSERVED,
            reason=f"colotrain audit -- {text}",
            parameters_live="step",
            gradients="whole",
            mesh=(1,),
        ),
        model=ModelPlan(target=""),
        data=DataPlan(
            source="target", seq_len=0, tokenizer="", shuffle=False, validation_fraction=0.0
        ),
        batch=BatchPlan(global_batch=0, micro_batch=0, accumulation_steps=0, data_parallel=0),
        train=TrainPlan(
            max_steps=steps,
            seed=0,
            precision="fp32",
            grad_clip=None,
            activation_checkpointing="none",
            compile=False,
            eval_every=0,
            eval_steps=0,
            on_nonfinite="stop",
        ),
        optim=OptimPlan(
            name="",
            lr=0.0,
            betas=(),
            eps=0.0,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            final_ratio=0.0,
        ),
        freeze=FreezePlan(),
        cluster=ClusterPlan(
            nodes=1, procs_per_node=1, device="cpu", threads_per_rank=1, memory_bytes=0
        ),
        elastic=ElasticPlan(max_restarts=0, hang_timeout_s=0.0),
        checkpoint=CheckpointPlan(enabled=False, every=0, keep=0, resume="none"),
        observe=ObservePlan(log_every=0, grads_every=0),
        parameters=ParameterCounts(total=0, trainable=0, frozen=0),
        memory=MemoryBreakdown(),
        flops_per_token=0.0,
    )


def environment(rundir: RunDir, *, steps: int) -> dict[str, str]:
    """Return the environment in which every Python process observes itself."""
    path = [str(START), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "COLOTRAIN_AUDIT": str(rundir.path),
        "COLOTRAIN_AUDIT_STEPS": str(steps),
    }


def run(command: Sequence[str], rundir: RunDir, *, steps: int, stdout: Any = None) -> int:
    """Run the command to its end and return its exit code, negative for a signal.

    Signals that this process gets go to the command; the terminal's reach it by themselves.
    """
    rundir.create()
    rundir.make_folder(rundir.audit)
    rundir.write_plan(plan_of(command, rundir, steps=steps))
    writer = EventWriter(rundir.launcher_events, inside=rundir.path)
    with liveness.claim(rundir), writer:
        try:
            process = subprocess.Popen(
                list(command), env=environment(rundir, steps=steps), stdout=stdout
            )
        except OSError as error:
            raise UsageError(
                f"{command[0]}: {error.strerror}", "name a program that exists"
            ) from error
        started = LaunchStarted(
            pid=process.pid, host=socket.gethostname(), world_size=1, began_at=time.time()
        )
        writer.write(started)
        code = _wait(process)
        status = "finished" if code == 0 else "interrupted" if is_interrupt(code) else "failed"
        cause = "" if code == 0 else ended_by(code)
        writer.write(LaunchEnded(status=status, exit_code=abs(code), cause=cause))
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    def forward(number: int, _: object) -> None:
        if number != signal.SIGINT or not sys.stdin or not sys.stdin.isatty():
            process.send_signal(number)  # a terminal sends Ctrl-C to the command by itself

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_interrupt(code: int) -> bool:
    return code in (-signal.SIGINT, 128 + signal.SIGINT)


def ended_by(code: int) -> str:
    """Return how a command ended that did not return 0."""
    if code < 0:
        return f"the command was ended by {signal_name(-code)}"
    return f"the command ended with exit code {code}"


def hidden_python(command: Sequence[str]) -> str:
    """Return the option of a Python by which it ignores the observation; empty if there is none."""
    if not re.match(r"python[\d.]*$", Path(command[0]).name):
        return ""
    options = [word for word in command[1:] if re.match(r"-[a-zA-Z]*[SIE]", word)]
    return options[0] if options else ""
