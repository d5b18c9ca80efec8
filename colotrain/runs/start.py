"""`colotrain run` and `colotrain resume`: resolve, write, launch, follow."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from colotrain.errors import ColotrainError, UsageError
from colotrain.events.fold import follow as view_of
from colotrain.events.liveness import find
from colotrain.launch.rendezvous import Node
from colotrain.launch.server.forkserver import end_unfit_server, warm_up
from colotrain.planner import measured_peaks
from colotrain.planner.machine import this_machine
from colotrain.records import as_override
from colotrain.rundir import RUNS, RunDir
from colotrain.runs import checkpoints, fetching, naming, trust
from colotrain.runs import detach as detached
from colotrain.runs.data_preparation import prepare_data
from colotrain.runs.resolving import (
    check_devices,
    check_fits,
    node_of,
    print_notes,
    resolve_config,
)
from colotrain.runs.uploader_process import UploaderProcess, report_unsent
from colotrain.schedulers.registry import recall, scheduler_of_job
from colotrain.show.console import print_json, stderr_console, tell
from colotrain.show.formatting import shown_loss
from colotrain.show.notify import check_notify
from colotrain.spec.exit_codes import DONE, FAILURES, LEFT, USAGE
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration, short_size
from colotrain.spec.schedulers import job_here

if TYPE_CHECKING:
    from rich.console import Console

    from colotrain.events.event import Event
    from colotrain.events.log import EventReader
    from colotrain.events.view import RunView


ONLY_NODE = Node()


def run(
    overrides: list[str],
    *,
    as_json: bool,
    force: bool = False,
    detach: bool = False,
    smoke_run: bool = False,
    began_at: float | None = None,
    overwrite: bool = False,
) -> int:
    """Resolve the overrides, write the run directory and train; `detach`: in the background.

    `began_at` is the Unix time at which the command began, by default now.
    """
    began_at = began_at or time.time()
    resolved = resolve_config(overrides, several=True, smoke=smoke_run)
    print_notes(resolved)
    plan = resolved.plan
    node = node_of(resolved.config, plan)
    if not force:
        check_fits(resolved)
    rundir = RunDir(RUNS / plan.name)
    if overwrite and plan.elastic.max_nodes > 1:
        fix = f"move {rundir.path} away before the first node starts"
        raise UsageError("--overwrite: expected a run on one node", fix)
    if node.is_head:
        fetching.fetch_to_resume(rundir, plan.runs_dir, overwrite=overwrite)
        if overwrite:  # before the older run is renamed
            checkpoints.check_named(plan, rundir, overwrite=True)
        naming.check_name(rundir, plan, resolved.config, overwrite=overwrite)
    if plan.elastic.max_nodes == 1 and (summary := naming.finished(rundir, plan)):
        return report_finished(rundir, summary, as_json=as_json)
    named = plan.checkpoint.resume not in ("auto", "none")
    if node.is_head and named and any(rundir.checkpoints.glob("step-*")):
        back = f"`colotrain resume {rundir.argument} checkpoint.resume=PATH` goes back"
        goes_on = f"{plan.name} has checkpoints of its own and goes on from the newest"
        tell(f"{goes_on}, not from checkpoint.resume; {back}")
    if detach and plan.elastic.max_nodes > 1:
        raise UsageError("--detach: expected a run on one node", "use nohup, or `colotrain submit`")
    if detach:
        check_notify(plan)
        checkpoints.check_resumable(plan, rundir)
        return detached.detach(plan, rundir, resolved.config, as_json=as_json)
    return train(plan, rundir, resolved.config, node=node, as_json=as_json, began_at=began_at)


def command_began_at() -> float:
    """Return the Unix time at which this process was started.

    psutil is not used on Linux: it adds whole seconds since boot and so is up to a second off.
    """
    try:
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except OSError:  # not Linux
        return psutil.Process().create_time()


def report_finished(rundir: RunDir, summary: dict[str, Any], *, as_json: bool) -> int:
    """Print the summary of a run that has nothing left to do: its events', not the file's."""
    from colotrain.events.view import summary as summary_of
    from colotrain.show.progress import print_summary

    naming.print_finished(rundir, summary)
    document = summary_of(view := view_of(rundir), plan := rundir.plan(), rundir)
    print_summary(stderr_console(), document, plan, view=view)
    if as_json:
        print_json(document)
    return 0


def run_quietly(overrides: list[str], *, progress: bool, force: bool) -> dict[str, Any]:
    """Train here to the end and return the summary; raise `ColotrainError` if the run fails.

    Without `progress` nothing is printed. A run that was interrupted or preempted returns its
    summary.
    """
    from rich.console import Console

    began_at = time.time()
    end_unfit_server()
    warm_up()
    resolved = resolve_config(overrides)
    if not force:
        check_fits(resolved)
    plan, rundir = resolved.plan, RunDir(RUNS / resolved.plan.name)
    fetching.fetch_to_resume(rundir, plan.runs_dir)
    naming.check_name(rundir, plan, resolved.config)
    checkpoints.check_resumable(plan, rundir)
    console = stderr_console() if progress else Console(file=io.StringIO(), quiet=True)
    sending = UploaderProcess(plan, rundir)
    exit_code, cause = execute(
        plan, rundir, resolved.config, console=console, began_at=began_at, sending=sending
    )
    document, _ = summarize(plan, rundir)
    left = sending.close()
    if exit_code in FAILURES:
        raise failed(exit_code, cause, plan, rundir)
    report_unsent(left, plan, rundir, finished=exit_code == 0)
    return document


def resume(
    run: str | None,
    overrides: list[str],
    *,
    as_json: bool,
    force: bool = False,
    trust_code: bool = False,
    digest: str | None = None,
) -> int:
    """Continue a run from its newest checkpoint; overrides make a new plan.

    If `checkpoint.resume=PATH` is among them, the run continues from that checkpoint instead.
    `digest`: that of a plan which was checked: no other is resumed, whatever that one names.
    """
    rundir = find(fetching.fetch_if_address(run))
    warm_up()
    trusted = trust_code or digest is not None
    fetch_trusted(rundir, rundir.plan(digest), run, overrides, trusted=trusted)
    own, submit, job = rundir.plan(digest), naming.submit_again(rundir, overrides), recall(rundir)
    if job and scheduler_of_job(job).is_elsewhere and not naming.has_begun(rundir):
        raise UsageError(f"{rundir.name}: its files are on the nodes of a job", f"use {submit}")
    if not own.model.value:
        problem = f"{rundir.name}: another program's training, which `colotrain audit` observed"
        raise UsageError(problem, "start that program again")
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    for left in view_of(rundir, ranks=()).nodes_left:
        tell(f"note: {left}; it is let in again")
    if job and not any(key.startswith("cluster") for key in given):
        check_devices(own, this_machine(), several=True, submit=submit)
    if not overrides and own.elastic.max_nodes == 1:
        trust.check_resumed(rundir, own, trusted=trusted, given=fetching.runs_dir_of(run))
        return train(own, rundir, None, as_json=as_json)
    stored = [as_override(key, text) for key, text in fetching.runs_dir_of(run).items()]
    words = [*stored, *overrides, as_override("name", rundir.name)]
    resolved = resolve_config(words, several=True, submit=submit, saved=rundir, trusted=trust_code)
    if resolved.plan.runs_dir != own.runs_dir or "runs_dir" in given:
        fetching.fetch_to_resume(rundir, resolved.plan.runs_dir)
    node = node_of(resolved.config, resolved.plan)
    if not force:
        check_fits(resolved)
    if node.is_head and "checkpoint.resume" in given:
        roll_back(rundir, resolved.plan)
    return train(resolved.plan, rundir, resolved.config, node=node, as_json=as_json)


def fetch_trusted(
    rundir: RunDir, plan: RunPlan, run: str | None, overrides: Sequence[str], *, trusted: bool
) -> None:
    """Fetch what the run's store has, unless arguments name another store.

    The plan names the store: it must be trusted, or the store be given as the argument `run`.
    """
    if any(text.lstrip("+~").startswith("runs_dir") for text in overrides):
        return
    given = fetching.runs_dir_of(run)
    fix = f"{trust.TRUST_IT}, or {trust.GIVE_IT}"
    trust.check(rundir, plan, trusted=trusted, only=("runs_dir",), given=given, fix=fix)
    fetching.fetch_to_resume(rundir, plan.runs_dir)


def roll_back(rundir: RunDir, plan: RunPlan) -> None:
    """Make the run continue from the requested checkpoint although it has newer ones."""
    from colotrain.events import liveness

    asked = plan.checkpoint.resume
    if asked == "none":
        fix = "use `colotrain run` with another name to start a new run"
        raise UsageError(f"checkpoint.resume=none: {rundir.name} is resumed", fix)
    if asked == "auto":
        return
    with liveness.claim(rundir):
        if done := checkpoints.roll_back(rundir, plan):
            tell(done)


def train(
    plan: RunPlan,
    rundir: RunDir,
    config: dict[str, Any] | None,
    *,
    node: Node = ONLY_NODE,
    as_json: bool,
    began_at: float | None = None,
) -> int:
    """Write the plan, prepare the data, launch, follow, and write `summary.json`.

    `config` is what a new plan was made from, so that the run can be resumed with changes; None if
    the plan is the run's own. Nodes other than node 0 only run their workers.
    """
    from colotrain.events.log import EventReader
    from colotrain.show.progress import print_summary

    console = stderr_console()
    if not node.is_head:
        return run_helper_node(plan, rundir, node, console=console)
    began_at = began_at or command_began_at()
    checkpoints.check_resumable(plan, rundir)
    before, sending = trust.read_files(rundir), UploaderProcess(plan, rundir)
    own_events = EventReader(rundir)
    own_events.skip_to_end()  # not by time: the clock may be set back meanwhile
    try:
        exit_code, cause = execute(
            plan, rundir, config, node=node, console=console, began_at=began_at, sending=sending
        )
    except KeyboardInterrupt:  # it came before there were workers
        tell(f"interrupted: {how_to_resume(plan, rundir)}")
        raise
    try:
        if exit_code in FAILURES and _made_no_step(own_events):
            trust.restore_files(before)
            plan = RunPlan.from_json(before.get(rundir.plan_file, plan.to_json()))
        document, view = summarize(plan, rundir)
    except OSError as error:  # the disk is full or read-only, perhaps because of which it failed
        if not cause:
            raise
        raise failed(exit_code, cause, plan, rundir) from error
    print_summary(console, document, plan, view=view)
    if plan.smoke and (line := close_smoke_run(document, plan, rundir)):
        tell(line)
    if document["status"] in ("preempted", "interrupted"):
        tell(how_to_resume(plan, rundir))
    if as_json:
        print_json(document)
    report_unsent(sending.close(), plan, rundir, finished=exit_code == 0)
    if exit_code in FAILURES and plan.smoke:
        raise ColotrainError(f"smoke run failed: {cause}", f"its logs are in {rundir.logs}")
    if exit_code in FAILURES:
        raise failed(exit_code, cause, plan, rundir)
    return exit_code


def failed(exit_code: int, cause: str, plan: RunPlan, rundir: RunDir) -> ColotrainError:
    """Return the error with which a command ends whose launch failed with `exit_code`."""
    if exit_code == USAGE:
        return UsageError(
            cause, f"correct it, as in `colotrain resume {rundir.argument} KEY=VALUE`"
        )
    return ColotrainError(cause, how_to_resume(plan, rundir))


def _made_no_step(events: EventReader) -> bool:
    """Whether a launch ended before its first step, so that its settings trained nothing.

    `events` reads those of this launch alone.
    """
    from colotrain.events.kinds import Step

    return not any(event.kind == Step.KIND for event in events.drain())


def how_to_resume(plan: RunPlan, rundir: RunDir) -> str:
    """Return how to continue a run that ended early."""
    from colotrain.engine.state.manifest import complete

    if not rundir.path.exists():
        return f"if {rundir.path} was renamed, `colotrain resume PATH` goes on in its new place"
    command = f"`colotrain resume {rundir.argument}`"
    if saved := complete(rundir.checkpoints):
        return f"{command} goes on from {saved[0].name}"
    why = "" if plan.checkpoint.enabled else " (checkpoint.every=0)"
    return f"nothing was saved{why}: {command} begins with the first step"


def summarize(plan: RunPlan, rundir: RunDir) -> tuple[dict[str, Any], RunView]:
    """Write `summary.json`; return its content and the view that it was made from."""
    from colotrain.events.view import summary

    view = view_of(rundir)
    document = summary(view, plan, rundir)
    if plan.smoke:
        document["smoke"] = smoke_report(view, plan, rundir)
    rundir.write_summary(document)
    whole = document["status"] == "finished" and view.world_size == plan.world_size
    if whole and not rundir.traces.exists():  # a trace in memory is part of the peak
        measured_peaks.remember(plan.memory_shape, document["memory"]["measured_peak"])
    return document, view


def run_helper_node(plan: RunPlan, rundir: RunDir, node: Node, *, console: Console) -> int:
    """Run this node's workers; node 0 leads the run and writes the plan and the summary."""
    from colotrain.launch.elastic import launch
    from colotrain.launch.smoke import launch_and_resume

    rundir.create()
    prepare_data(plan, console)
    tell(f"node {node.rank} of {rundir.name}: with node 0 at {node.host}:{node.port}")
    exit_code, cause = (launch_and_resume if plan.smoke else launch)(plan, rundir, node=node)
    if exit_code in FAILURES:
        raise ColotrainError(f"node {node.rank}: {cause}", "see what node 0 says")
    if exit_code == LEFT:
        cause = f"was left, and the run goes on without this machine: {cause}"
    if cause:
        tell(f"node {node.rank}: {cause}")
    # a scheduler may end a whole job because of one node's exit code
    return DONE if exit_code == LEFT and job_here() else exit_code


def execute(
    plan: RunPlan,
    rundir: RunDir,
    config: dict[str, Any] | None,
    *,
    node: Node = ONLY_NODE,
    console: Console,
    began_at: float | None = None,
    sending: UploaderProcess | None = None,
) -> tuple[int, str]:
    """Write the plan, prepare the data, launch, and follow; return exit code and cause.

    `sending` is started once this process is the run's launcher; the caller closes it.
    """
    from colotrain.events import liveness
    from colotrain.events.fold import Fold
    from colotrain.events.slow_ranks import SlowRankWatch
    from colotrain.launch.elastic import launch, shielded
    from colotrain.launch.slow_nodes import SlowNodes
    from colotrain.launch.smoke import launch_and_resume
    from colotrain.launch.startup import end_recorded, ended_by_signals
    from colotrain.show.live import progress_for
    from colotrain.show.metrics import MetricsServer
    from colotrain.show.notify import Notifier
    from colotrain.show.trackers import Trackers

    check_notify(plan)
    rundir.create()
    notifier, metrics = Notifier(plan, rundir), MetricsServer(plan)
    sent = sending or nullcontext()
    with liveness.claim(rundir), sent, notifier, end_recorded(rundir), metrics:
        trust.write_signed(plan, rundir, config)
        for text in plan.warnings:
            console.print(f"warning: {text}", style="yellow", soft_wrap=True)
        with ended_by_signals():
            prepare_data(plan, console)
        fold, slow_ranks = Fold(max_steps=plan.train.max_steps), SlowRankWatch()
        slow_nodes = None
        if plan.elastic.replace_slow:
            slow_nodes = SlowNodes(plan=plan, num_left=len(view_of(rundir, ranks=()).nodes_left))
        with progress_for(console, plan, rundir) as shown, Trackers(plan, rundir) as trackers:

            def update(events: list[Event]) -> Sequence[str]:
                shown.update(fold.view(), events)
                return ()

            display = shielded(update)

            def show(events: list[Event]) -> Sequence[str]:
                view = fold.add(events).view()
                notes = [*notifier.take(events, view), *metrics.take(events, view)]
                display([*events, *notes, *trackers.take(events)])
                if slow_nodes is not None:
                    slow_nodes.look(view)
                return slow_ranks.look(view)

            start = launch_and_resume if plan.smoke else partial(launch, slow_nodes=slow_nodes)
            ended = start(plan, rundir, follow=show, node=node, began_at=began_at)
            display([*trackers.close(), *notifier.close()])
    return ended


SAVED_STEP = 1


def smoke_report(view: RunView, plan: RunPlan, rundir: RunDir) -> dict[str, Any]:
    """Return the `smoke` section of the summary: whether the run passed, and its cost.

    `seconds` counts from the start of the command and includes the preparation of the data.
    """
    saved = rundir.checkpoint(SAVED_STEP)
    resumed = SAVED_STEP in view.resumed
    return {
        "passed": view.status == "finished" and view.steps == plan.train.max_steps and resumed,
        "resumed_from_step": SAVED_STEP if resumed else None,
        "checkpoint_bytes": sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()),
        "evaluations": len(view.evals),
        "seconds": time.time() - psutil.Process().create_time(),
    }


def close_smoke_run(document: dict[str, Any], plan: RunPlan, rundir: RunDir) -> str:
    """Delete the checkpoint of a smoke run that passed; return the line that says what ran.

    The line is empty if the run did not pass; the error is reported elsewhere.
    """
    found, memory = document["smoke"], document["memory"]
    if not found["passed"]:
        return ""
    shutil.rmtree(rundir.checkpoint(SAVED_STEP), ignore_errors=True)
    batch, evals = plan.batch, found["evaluations"]
    each = (
        "a micro-batch"
        if batch.accumulation_steps == 1
        else f"{batch.accumulation_steps} micro-batches"
    )
    evaluated = (
        f"{evals} evaluation{'s' * (evals > 1)}" if evals else "no evaluation (the plan has none)"
    )
    predicted = short_size(memory["predicted_peak"])
    peak = short_size(max(memory["peak_by_rank"], default=0))
    loss = shown_loss(document["loss"]["last"])
    return (
        f"smoke run passed in {short_duration(found['seconds'])}: {plan.plugin.name} on "
        f"{plan.world_size} {plan.cluster.device} rank{'s' * (plan.world_size > 1)}, "
        f"{document['steps']} steps of {each} (loss {loss}), {evaluated}, a checkpoint of "
        f"{short_size(found['checkpoint_bytes'])} written, resumed from and removed; "
        f"peak {peak} per rank ({predicted} predicted)"
    )
