"""Run names: one name stands for one run; another run of that name is refused or set aside."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

from colotrain.config.schema import Config
from colotrain.errors import ColotrainError, UsageError
from colotrain.events import liveness
from colotrain.records import as_argument, read, to_plain
from colotrain.rundir import RunDir, read_json
from colotrain.schedulers import registry
from colotrain.schedulers.job import OVER
from colotrain.schedulers.registry import recall
from colotrain.show.console import tell
from colotrain.spec.plan import RunPlan

WHERE_IT_STARTS = (
    "name",
    "recipe",
    "runs_dir",
    "checkpoint.resume",
    "cluster.node_rank",
    "cluster.rdzv_endpoint",
)
"""Keys that say where a run starts or what it is called, and do not count as its settings."""
MOST_SHOWN = 8


def check_name(
    rundir: RunDir, plan: RunPlan, config: dict[str, Any], *, overwrite: bool = False
) -> None:
    """Raise `UsageError` if a run with this name and other settings exists.

    A run that has begun to train, or that has a job, may only be continued with its original
    settings, so that its results are never taken for those of other settings. With `overwrite`, it
    is set aside first.
    """
    if not rundir.plan_file.exists():
        return
    if overwrite:
        set_aside(rundir)
        return
    if plan.checkpoint.resume == "none" or plan.smoke:
        raise UsageError(
            f"name={rundir.name}: {rundir.path} exists",
            "choose another name, or --overwrite to rename that run"
            + ("" if plan.smoke else ", or checkpoint.resume=auto to go on with it"),
        )
    if not (has_begun(rundir) or recall(rundir)):
        return  # it failed before it produced anything
    before = _config_of(rundir)
    own, given = before.get("name"), config["name"]
    if given is not None and own not in (None, given, rundir.name):
        raise UsageError(
            f"name={given}: its folder {rundir.path} is that of the run {own}",
            "choose a name that differs in letters, digits, '.', '_' or '-'",
        )
    changed = list(differences(before, config))
    if changed:
        what = ", ".join(f"{key}={_shown(old)}, not {_shown(new)}" for key, old, new in changed)
        if len(changed) > MOST_SHOWN:
            keys = ", ".join(key for key, _, _ in changed[:MOST_SHOWN])
            what = f"{keys} and {len(changed) - MOST_SHOWN} more keys"
        change = f"`colotrain resume {rundir.argument} KEY=VALUE`"
        if recall(rundir):  # it was submitted and has to go on as a job
            change = f"one with {as_argument('checkpoint.resume', os.path.relpath(rundir.path))}"
        raise UsageError(
            f"name={rundir.name}: that run was made with other settings: {what}",
            f"choose another name, or {change} to go on with changes, or --overwrite to "
            "rename that run and start over",
        )


def _shown(value: Any) -> str:
    return "null" if value is None else " ".join(str(value).split())[:60]


def has_begun(rundir: RunDir) -> bool:
    """Whether the run has anything to lose: a step, a checkpoint, or a live launcher."""
    if any(rundir.checkpoints.glob("step-*")) or liveness.is_alive(rundir):
        return True
    return liveness.has_trained(rundir)


def finished(rundir: RunDir, plan: RunPlan) -> dict[str, Any] | None:
    """Return the summary of a run that has completed all steps of the plan, else None."""
    if not rundir.plan_file.exists() or liveness.is_alive(rundir):
        return None
    try:
        summary = read_json(rundir.summary_file, rundir.open)
        all_steps = summary["steps"] >= plan.train.max_steps or "stopped_early" in summary
        done = summary["status"] == "finished" and all_steps
        return summary if done else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def print_finished(rundir: RunDir, summary: dict[str, Any]) -> None:
    early = f" ({summary['stopped_early']})" if "stopped_early" in summary else ""
    tell(
        f"{rundir.name} has finished its {summary['steps']} steps already{early}, with these "
        "settings: "
        f"`colotrain resume {rundir.argument} train.max_steps=N` trains on, another name "
        "starts a new run"
    )


def set_aside(rundir: RunDir) -> None:
    """Rename a run's folder to NAME.old-TIME; raise `UsageError` while a process or job uses it."""
    check_job(rundir)
    old = RunDir(rundir.path.with_name(f"{rundir.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
    with liveness.claim(rundir):
        os.rename(rundir.path, old.path)
    liveness.release(old)
    text = f"note: the run that was called {rundir.name} is {old.name} now, in {old.path}"
    tell(text)


def check_job(rundir: RunDir) -> None:
    """Raise `UsageError` if an unfinished job has the run."""
    known = recall(rundir)
    state = registry.ask([known]).states.get(known.job) if known else None
    if known and state and state.state not in OVER:
        raise UsageError(
            f"name={rundir.name}: job {known.job} has this run ({state.state})",
            f"choose another name, or `colotrain stop {rundir.argument}`",
        )


def _config_of(rundir: RunDir) -> dict[str, Any]:
    try:
        document = read_json(rundir.config_file, rundir.open)
    except (OSError, ValueError) as error:
        raise ColotrainError(
            f"name={rundir.name}: what that run was made with cannot be read ({error})",
            f"choose another name, or `colotrain resume {rundir.argument}`",
        ) from error
    return document if isinstance(document, dict) else {}


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of each setting that differs; missing ones have defaults."""
    before, now = _settings(old), _settings(new)
    for key in [*now, *(key for key in before if key not in now)]:
        if key not in WHERE_IT_STARTS and before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def settings_that_differ(
    rundirs: Sequence[RunDir], *, by_recipe: bool = False
) -> list[dict[str, Any]]:
    """Return, per run, the settings that differ in another run (`by_recipe`: of its recipe)."""
    known, found = [_known_settings(rundir) for rundir in rundirs], []
    for own in known:
        alike = [o for o in known if o and (not by_recipe or o["recipe"] == own.get("recipe"))]
        differ = {k: v for k, v in own.items() if any(other.get(k) != v for other in alike)}
        found.append({k: v for k, v in differ.items() if k not in WHERE_IT_STARTS})
    return found


def _known_settings(rundir: RunDir) -> dict[str, Any]:
    """Return all settings of a run; an empty dict if they cannot be read."""
    try:
        return _settings(_config_of(rundir))
    except (ColotrainError, ValueError):
        return {}


def shown(settings: dict[str, Any], *, most: int = MOST_SHOWN) -> str:
    """Return text like `optim.lr=0.1 train.seed=3 and 2 more`."""
    words = [f"{key}={_shown(value)}" for key, value in settings.items()]
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return " ".join([*words[:most], *more])


def describe_differences(rundirs: Sequence[RunDir]) -> list[str]:
    """Return a line for each run with the settings in which it differs."""
    pairs = zip(rundirs, settings_that_differ(rundirs), strict=True)
    return [f"settings that differ: {run.name}: {shown(own)}" for run, own in pairs if own]


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    return dict(_flat(to_plain(read(Config, config, key="", problems=[]))))


def _flat(plain: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def submit_again(rundir: RunDir, overrides: Sequence[str] = ()) -> str:
    """Return the command that continues the run as a job; changed settings need a new name."""
    recipe = as_argument("recipe", os.path.relpath(rundir.config_file))
    if not overrides:
        return f"`colotrain submit {recipe} {as_argument('name', rundir.name)}`"
    begin = as_argument("checkpoint.resume", os.path.relpath(rundir.path))
    return f"`colotrain submit {recipe} name=NEW {begin} {shlex.join(overrides)}`"
