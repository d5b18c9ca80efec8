"""Resolves a command's arguments to a plan: composes them, examines machine and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colotrain import host
from colotrain.callers_script import NAMED, named_by
from colotrain.config.checks import split_address
from colotrain.config.shipped import run_holding
from colotrain.errors import ConfigError, DoesNotFit, Problem
from colotrain.launch.rendezvous import Node
from colotrain.launch.server.forked_calls import ForkedCaller
from colotrain.launch.server.forkserver import import_agent, is_warm, warm_up
from colotrain.planner.context import PlanningContext
from colotrain.planner.fix_hints import fix_hints
from colotrain.planner.machine import Machine
from colotrain.planner.smoke import shrink
from colotrain.rundir import RunDir
from colotrain.runs import hub, trust
from colotrain.runs.job import on_nodes
from colotrain.schedulers.registry import scheduler_of
from colotrain.show.console import stderr_console, tell
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import format_size
from colotrain.spec.schedulers import job_here
from colotrain.spec.survey import Survey

MOST_RANKS_PER_CORE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A command's composed configuration, and the plan that it resolves to."""

    config: dict[str, Any]
    plan: RunPlan
    context: PlanningContext
    """Inputs of the plan, from which alternatives to it can be computed.

    Its machine is this one, or a node of a job.
    """
    notices: tuple[str, ...] = ()
    """Notes on settings that were chosen for the user."""
    not_traced: str = ""
    """Why no micro-batch could be traced through the model; empty where one was."""

    @property
    def survey(self) -> Survey:
        """Return the survey of the model, made with everything trainable that ever will be."""
        return self.context.stage.survey

    def resolve(self, config: dict[str, Any]) -> RunPlan:
        """Return the plan of a changed configuration on the same machine."""
        return _resolve(config, self.context.machine)[0]


def plan_from(overrides: Sequence[str], *, here: bool = True) -> RunPlan:
    """Return the plan that the arguments describe; raise `ConfigError` with all problems."""
    return resolve_config(overrides, here=here).plan


def plan_apart(overrides: Sequence[str]) -> RunPlan:
    """`plan_from`, with the user's modules and torch imported in processes of their own.

    What the calling script itself defines is taken from here: it need not have a main guard.
    """
    if NAMED not in repr(overrides):
        warm_up(to_plan=True)
    return plan_from(overrides)


def resolve_config(
    overrides: Sequence[str],
    *,
    here: bool = True,
    several: bool = False,
    job: bool | None = False,
    smoke: bool = False,
    submit: str = "`colotrain submit` with the same arguments",
    saved: RunDir | None = None,
    trusted: bool = False,
) -> ResolvedConfig:
    """Compose the arguments and resolve them; raise `ConfigError` with all problems.

    `here`: the plan will run on this machine, so its ranks must find a place on it; `several`: on
    other machines too. `job`: it will run on a scheduler's nodes; None: decided by the arguments.
    `smoke`: return the smoke run of the described plan. `submit`: the command that submits it as a
    job, for messages. `saved`: a run whose configuration the arguments change; `trusted`: whatever
    it names.
    """
    from colotrain.planner.machine import this_machine

    host.check_open_files()
    notices, warnings, obstacles = list[str](), list[str](), list[str]()
    config, problems = compose(overrides, saved=saved, trusted=trusted, notices=notices)
    if hub.keys_with_names(config):
        from colotrain.planner.resolve import refuse_mistakes

        refuse_mistakes(config, problems)  # before anything is downloaded
    problems += hub.with_folders_(config, notices)
    machine = this_machine()
    if job or (job is None and scheduler_of(config)):
        found = on_nodes(config, machine)
        machine = found.machine
        notices += found.notices
        warnings += found.warnings
        problems += found.problems
    elif not here:
        machine = _elsewhere(config, machine)
    plan, context = _resolve(config, machine, found=problems, obstacles=obstacles)
    if smoke:
        config = shrink(config, plan)
        plan, context = _resolve(config, machine, smoke=True)
    plan = replace(plan, warnings=(*warnings, *plan.warnings))
    if here:
        check_devices(plan, machine, several=several, submit=submit if scheduler_of(config) else "")
        _check_allocation(config, plan, submit)
    return ResolvedConfig(
        config=config,
        plan=plan,
        context=context,
        notices=tuple(notices),
        not_traced="".join(obstacles[-1:]),
    )


def compose(
    overrides: Sequence[str],
    *,
    notices: list[str],
    saved: RunDir | None = None,
    trusted: bool = False,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the composed configuration, and all problems; `UsageError` if it is not trusted.

    `saved` is as in `resolve_config`; a run directory's file given as a recipe counts as that.
    """
    from colotrain.config.compose import gather, recipe_of

    words = list(overrides)
    fix = {}
    if saved is None and (saved := _run_of(recipe_of(words))):
        words = [word for word in words if not word.lstrip("+").startswith("recipe=")]
        fix = {"fix": f"{trust.GIVE_IT}, or {trust.KEEP_IT}"}
    if saved is None:
        return gather(words, notices=notices)
    own = trust.read_config(saved)
    config, problems = gather(words, notices=notices, saved=own)
    trust.check_config(saved, own, config, arguments=gather(words)[0], trusted=trusted, **fix)
    return config, problems


def _run_of(recipe: str | None) -> RunDir | None:
    """Return the run directory whose configuration is given as a recipe; None for other recipes."""
    file = Path(recipe or "").expanduser()
    is_saved = file.name == RunDir(file.parent).config_file.name and run_holding(file)
    return RunDir(file.parent) if is_saved else None


def _check_allocation(config: dict[str, Any], plan: RunPlan, submit: str) -> None:
    """Refuse to train a job on a login node's CPU, which `auto` would choose there."""
    chosen = config["cluster"]["device"] != "auto" or job_here() is not None
    if chosen or plan.cluster.device != "cpu" or not scheduler_of(config):
        return
    expected = "a device by name: these are the settings of a job, and this is none of its nodes"
    fix = f"{submit} runs it there, cluster=local or cluster.device=cpu here"
    raise ConfigError([Problem(key="cluster.device", value="auto", expected=expected, fix=fix)])


def _elsewhere(config: dict[str, Any], machine: Machine) -> Machine:
    """Return the machine without its own GPUs if the configuration describes other hardware."""
    described = config.get("hardware")
    if not isinstance(described, dict) or described.get("name") is None:
        return machine
    cores_alone = replace(machine, threads=0, threads_set_by="")
    return replace(cores_alone, device="cpu", num_devices=0, device_memory_bytes=0)


def print_notes(*configs: ResolvedConfig, warnings: bool = False) -> None:
    """Print the notes, and if asked the warnings, of all configurations on stderr, each once."""
    lines = [f"note: {notice}" for resolved in configs for notice in resolved.notices]
    if warnings:
        lines += [f"warning: {w}" for resolved in configs for w in resolved.plan.warnings]
    for line in dict.fromkeys(lines):
        tell(line)


def _resolve(
    config: dict[str, Any],
    machine: Machine,
    found: Sequence[Problem] = (),
    *,
    smoke: bool = False,
    obstacles: list[str] | None = None,
) -> tuple[RunPlan, PlanningContext]:
    """Return plan and inputs; add to `obstacles` why no micro-batch could be traced."""
    from colotrain.planner.model_surveys import ModelSurveys
    from colotrain.planner.resolve import resolve
    from colotrain.show.progress import preparation

    meanwhile = import_agent if is_warm(to_launch=True) else lambda: None
    with ForkedCaller(meanwhile=meanwhile, script=named_by(config)) as caller:
        surveys = ModelSurveys(caller, lambda: preparation(stderr_console()))
        resolved = resolve(config, surveys=surveys, machine=machine, found=found, smoke=smoke)
        if obstacles is not None:
            obstacles += surveys.obstacles
        return resolved


def check_devices(plan: RunPlan, machine: Machine, *, several: bool, submit: str = "") -> None:
    """Raise `ConfigError` if ranks lack a device on this machine or are absurdly many.

    `submit` is the command that submits the plan as a job, for messages.
    """
    if plan.cluster.nodes > 1 and not several:
        expected, fix = "1: this verb uses one machine", "set cluster.nodes=1"
        key, value = "cluster.nodes", plan.cluster.nodes
        raise ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])
    most, why = machine.num_devices, f"{machine.num_devices} GPUs that torch can use"
    if plan.cluster.device == "cuda" and not most:
        expected = "a GPU that torch can use: this machine has none"
        fix = "use `colotrain plan` to plan for other machines, or cluster=local to run on this one"
        fix = f"its ranks run on the nodes of a job: {submit}" if submit else fix
        device = plan.cluster.device
        raise ConfigError([Problem(key="cluster.device", value=device, expected=expected, fix=fix)])
    if plan.cluster.device == "cpu":
        most, why = MOST_RANKS_PER_CORE * machine.num_cores, f"{machine.num_cores} cores"
    procs = plan.cluster.procs_per_node
    if procs > most:
        expected = f"at most {most} ranks on this machine ({why})"
        fix = "lower it, or use `colotrain plan` to plan for another machine"
        fix = f"its ranks run on the nodes of a job: {submit}" if submit else fix
        key = "cluster.procs_per_node"
        raise ConfigError([Problem(key=key, value=procs, expected=expected, fix=fix)])


def node_of(config: dict[str, Any], plan: RunPlan) -> Node:
    """Return which of the run's nodes this machine is; raise `ConfigError` if that is not set."""
    cluster = config["cluster"]
    if plan.elastic.max_nodes == 1:
        return Node()
    wanted = {
        "name": (config["name"], "name=NAME, the same on every node"),
        "cluster.node_rank": (
            cluster["node_rank"],
            "cluster.node_rank=0 on the first node, 1 on the next",
        ),
        "cluster.rdzv_endpoint": (
            cluster["rdzv_endpoint"],
            "cluster.rdzv_endpoint=HOST:PORT of node 0 on every node",
        ),
    }
    problems = [
        Problem(key=key, expected="a value, in a run on several nodes", fix=f"add {fix}")
        for key, (value, fix) in wanted.items()
        if value is None
    ]
    if problems:
        raise ConfigError(problems)
    host, port = split_address(cluster["rdzv_endpoint"]) or ("", 0)
    return Node(rank=cluster["node_rank"], host=host, port=port)


def check_fits(resolved: ResolvedConfig) -> None:
    """Refuse a plan that certainly needs more than a rank may use (`DoesNotFit`, exit code 3)."""
    plan = resolved.plan
    least, room = plan.peak.exact, plan.cluster.memory_bytes
    if plan.peak.verdict(room) == "no":
        raise DoesNotFit(
            f"{plan.plugin.name} needs at least {format_size(least)} per rank, of "
            f"{format_size(room)}",
            f"{fix_hints(resolved.context, plan)}, or --force to run it anyway",
        )
