"""`colotrain new`: a recipe with comments, for a model and data that were looked at."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colotrain.cli.data import plan_of_data
from colotrain.config.compose import settings_of
from colotrain.config.shipped import GROUPS, NAMED
from colotrain.errors import ColotrainError, ConfigError, Problem, UsageError
from colotrain.migrate.new_recipe import BATCHES, render
from colotrain.records import as_argument, as_override
from colotrain.rundir import write_atomically
from colotrain.runs.resolving import plan_from
from colotrain.show.console import print_json, stderr_console, tell
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import format_size

MODELS, DATA = (
    ("model.hf", "model.target"),
    ("data.path", "data.target", "data.corpus", "data.mixture"),
)
LONGEST = 4096
"""Tokens of a sample above which a recipe cuts rather than making all samples longer."""
FEW_STEPS = 50
"""Steps of an epoch below which the global batch is made smaller."""


def new(name: str, words: list[str], *, as_json: bool) -> int:
    """Write recipes/NAME.yaml; print what was found and what to do next."""
    target = _target(name)
    given = _given(words)
    described = _describe(given) if "data.target" not in given else None
    settings = {**given, **dict(_chosen(given, described))}
    problems, plan = _plan(settings)
    target.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["colotrain", "new", name, *words])
    found = [*_of_data(described), *_of_plan(plan)]
    write_atomically(target, render(settings, [f"Written by `{command}`.", *found]))
    if as_json:
        digest = (
            None
            if plan is None
            else {"plugin": plan.plugin.name, "max_steps": plan.train.max_steps}
        )
        print_json(
            {"recipe": str(target), "settings": settings, "plan": digest, "problems": problems}
        )
        return 0
    for line in found:
        tell(line)
    for problem in problems:
        tell(f"warning: to be corrected first: {problem}")
    recipe = as_argument("recipe", name)
    tell(
        f"{target} is written: `colotrain data inspect {recipe}` shows a sample as the model sees "
        f"it, `colotrain plan {recipe}` memory and time, and `colotrain run {recipe}` trains"
    )
    return 0


def _target(name: str) -> Path:
    target = Path("recipes") / f"{name}.yaml"
    if not name or any(not (c.isalnum() or c in "-_") for c in name):
        raise UsageError(f"new {name}: expected a name of letters, digits, '-' and '_'")
    if target.exists():
        raise UsageError(f"{target}: exists", "remove it, or choose another name")
    return target


def _given(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the arguments give; raise `ConfigError` for what is missing."""
    given = settings_of(words)
    problems = [
        Problem(key=key, value=value, expected="settings of a section, as in model.hf=DIR")
        for key, value in given.items()
        if key in GROUPS and key not in NAMED
    ]
    for keys, fix in ((MODELS, "model.hf=DIRECTORY"), (DATA, "data.path=FILE")):
        if not any(given.get(key) for key in keys):
            others = f"or {', '.join(keys[1:])}"
            problems.append(Problem(key=keys[0], expected=f"a value ({others})", fix=f"add {fix}"))
    if "recipe" in given:
        expected = "settings alone, which become a recipe"
        problems.append(Problem(key="recipe", value=given["recipe"], expected=expected))
    if problems:
        raise ConfigError(problems)
    for group in {key.partition(".")[0] for key in given if "." in key} & set(given):
        given[f"{group}.name"] = given.pop(group)
    return given


def _describe(given: Mapping[str, Any]) -> dict[str, Any]:
    from colotrain.data.read.inspection import describe
    from colotrain.show.progress import preparation

    of_data = {**given, "freeze.patterns": []}  # names of parameters are for the plan to judge
    plan = plan_of_data([as_override(key, value) for key, value in of_data.items()])
    with preparation(stderr_console()) as progress:
        return describe(plan.data, progress)


def _chosen(
    given: Mapping[str, Any], described: dict[str, Any] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a recipe needs and that were not given."""
    if not {"plugin", "plugin.name"} & set(given):
        yield "plugin.name" if any(key.startswith("plugin.") for key in given) else "plugin", "auto"
    lengths = _lengths(described)
    if "data.seq_len" not in given and lengths is not None:
        yield "data.seq_len", min(LONGEST, -(-lengths["max"] // 8) * 8)
    if not {"train.epochs", "train.max_steps"} & set(given):
        yield "train.epochs", 1
    if "train.global_batch" not in given:
        count = described["samples"]["train"] if described else 0
        fitting = (size for size in BATCHES if count >= FEW_STEPS * size)
        yield "train.global_batch", next(fitting, BATCHES[-1])
    if "train.micro_batch" not in given:
        yield "train.micro_batch", "auto"
    if given.get("adapter.name") and "adapter.targets" not in given:
        yield "adapter.targets", "all-linear"
    if "optim.lr" not in given:
        rate = 2e-4 if given.get("adapter.name") else 2e-5
        yield "optim.lr", rate if given.get("model.hf") else 3e-4


def _lengths(described: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the lengths of data in which each document is a sample."""
    if described is None or len(described["parts"]) != 1:
        return None
    part = described["parts"][0]
    return part["lengths"] if part["packing"] == "none" else None


def _plan(settings: Mapping[str, Any]) -> tuple[list[str], RunPlan | None]:
    """Return what keeps the recipe from being a plan on this machine, and the plan."""
    try:
        return [], plan_from([as_override(key, value) for key, value in settings.items()])
    except ConfigError as error:
        return [str(problem) for problem in error.problems], None
    except ColotrainError as error:
        return [str(error)], None


def _of_data(described: dict[str, Any] | None) -> Iterator[str]:
    for part in described["parts"] if described else ():
        yield f"Data: {part['text']}."
        if (lengths := part["lengths"]) is not None:
            share = part["in_loss"] / max(part["tokens"]["train"], 1)
            yield (
                f"{part['documents']['train']:,} documents of {lengths['min']:,} to "
                f"{lengths['max']:,} tokens (median {lengths['median']:,.0f}); {share:.0%} of the "
                "tokens are trained on."
            )
        yield from (f"Note: {note['text']}" for note in part["notes"])


def _of_plan(plan: RunPlan | None) -> Iterator[str]:
    if plan is not None:
        yield (
            f"Here, on {plan.world_size} ranks: {plan.plugin.name}, micro-batches of "
            f"{plan.batch.micro_batch}, up to {format_size(plan.peak.high)} a rank, "
            f"{plan.train.max_steps:,} steps."
        )
