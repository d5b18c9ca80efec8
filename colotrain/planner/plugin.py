"""The plugin of a plan: mesh, chunks, overrides per module, the reason for the choice, checks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from colotrain.config.schema import Plugin
from colotrain.config.sizes import check_size, parse_size
from colotrain.errors import Problem, suggest
from colotrain.planner.advise import TIE, best
from colotrain.planner.budget import check_budget, find_budget, with_own_folder
from colotrain.planner.context import Option, PlanningContext
from colotrain.planner.machine import Machine
from colotrain.planner.scale import Scale
from colotrain.spec.axes import Ranks
from colotrain.spec.packing import choose_chunk_bytes, units_of
from colotrain.spec.plan import PluginPlan, TrainPlan
from colotrain.spec.plugins import AUTO_ORDER, ROWS, Row, overrides
from colotrain.spec.quantities import format_seconds, format_size
from colotrain.spec.survey import Survey

MOST_BLOCKS = 10_000


def decide(context: PlanningContext) -> tuple[PluginPlan, Option]:
    """Plan of a plugin that `check_plugin` accepts, and the memory and time it needs.

    `auto` takes the fastest that fits; where times are unknown, the first that fits.
    """
    asked, capacity = context.settings.plugin, context.scale.memory_bytes
    if asked.name != "auto":
        plugin = plan_plugin(asked.name, asked, context, reason="asked for")
        return plugin, context.option(plugin)
    names = [n for n in AUTO_ORDER if not ROWS[n].hybrid or context.scale.nodes > 1]
    plugins = {name: plan_plugin(name, asked, context) for name in names}
    options = [context.option(plugins[name]) for name in names]
    if not capacity:
        least = min(reversed(options), key=lambda option: option.memory.total)
        reason = "the memory of a rank is not known: what needs least of it"
        return dataclasses.replace(plugins[least.plugin], reason=reason), least
    plain = [o for o in options if o.verdict == "yes" and not ROWS[o.plugin].packed]
    chosen = best(plain or options)  # gemini only where nothing simpler fits
    reason = explain(chosen, options, capacity)
    chosen = chosen or min(reversed(options), key=lambda option: option.memory.total)
    return dataclasses.replace(plugins[chosen.plugin], reason=reason), chosen


def explain(chosen: Option | None, options: list[Option], capacity: int) -> str:
    """The reason for the choice of `auto`, in one sentence."""
    room = format_size(capacity)
    if chosen is None:
        least = min(reversed(options), key=lambda option: option.memory.total)
        need = format_size(least.memory.total)
        return f"none fits: even {least.plugin} needs {need} per rank, of {room}"
    need, timed = format_size(chosen.memory.total), chosen.time.step_s > 0
    beside = [_beside(o, chosen) for o in options if o is not chosen]
    others = f" ({'; '.join(beside)})" if beside else ""
    if chosen.verdict == "tight":
        return f"none surely fits; this one needs least: {need} per rank, of {room}{others}"
    if timed and sum(option.verdict == "yes" for option in options) > 1:
        step = format_seconds(chosen.time.step_s)
        # gemini is taken only where nothing simpler fits, also if it is a little faster
        faster = any(
            o.verdict == "yes" and TIE * o.time.step_s < chosen.time.step_s for o in options
        )
        what = "the fastest that fits beside gemini" if faster else "the fastest that fits"
        return f"{what}: {step} a step, {need} per rank of {room}{others}"
    return f"the first that fits: {need} per rank, of {room}{others}"


def _beside(option: Option, chosen: Option) -> str:
    if option.verdict != "yes":
        return f"{option.plugin} needs {format_size(option.memory.total)}"
    if option.time.step_s <= TIE * chosen.time.step_s:
        return f"{option.plugin} is as fast"
    return f"{option.plugin} takes {format_seconds(option.time.step_s)}"


def plan_plugin(
    name: str, asked: Plugin, context: PlanningContext, *, reason: str = ""
) -> PluginPlan:
    """Plan of the plugin `name`, with the settings `asked` for."""
    scale, row, split = context.scale, _row(name, asked.reshard), can_split(context.train)
    chunk_bytes = None
    if row.packed and asked.chunk_size != "auto":
        chunk_bytes = parse_size(asked.chunk_size, whole=scale.memory_bytes)
    elif row.packed:  # that of the stage with most parameters, for all stages alike
        surveys = [stage.survey for stage in context.stages]
        survey = max(surveys, key=lambda survey: sum(p.numel for p in survey.parameters))
        units = units_of(survey.parameters, split=split)
        chunk_bytes = choose_chunk_bytes(units, state_bytes=_state_bytes(survey, scale))
    plan = PluginPlan(
        name=name,
        reason=reason,
        parameters_live=row.parameters_live,
        gradients=row.gradients,
        mesh=_mesh(name, asked, scale),
        chunk_bytes=chunk_bytes,
        split_blocks=row.packed and split,
        reshard_overrides={module: bool(o["reshard"]) for module, o in asked.overrides.items()},
        budget=find_budget(asked, scale, context.machine) if row.packed else None,
    )
    return with_own_folder(plan, asked, context) if row.packed else plan


def can_split(train: TrainPlan) -> bool:
    """Whether blocks may be split: not where checkpointing or compile wraps a block's forward."""
    return train.activation_checkpointing == "none" and not train.compile


def _row(name: str, reshard: bool | None) -> Row:
    if reshard is None:
        return ROWS[name]
    return dataclasses.replace(ROWS[name], parameters_live="use" if reshard else "step")


def _mesh(name: str, asked: Plugin, scale: Scale) -> tuple[int, ...]:
    largest = scale.ranks.largest_shard(procs_per_node=scale.procs_per_node)
    shard = asked.shard_size or largest if ROWS[name].hybrid else None
    return Ranks.of(scale.mesh, world=scale.world, shard=shard).data_sizes


def _state_bytes(survey: Survey, scale: Scale) -> int:
    """Bytes per rank of parameters, gradients and Adam's two moments."""
    sizes = (p.numel * p.itemsize * (4 if p.frozen_by is None else 1) for p in survey.parameters)
    return sum(sizes) // scale.copies


def check_plugin(asked: Plugin, scale: Scale, machine: Machine) -> Iterator[Problem]:
    """Problems of the plugin's settings that show without the model."""
    row = ROWS.get(asked.name)
    if row is None and asked.name != "auto":
        fix = suggest(asked.name, (*ROWS, "auto"))
        expected = "one of " + ", ".join((*ROWS, "auto"))
        yield Problem(key="plugin.name", value=asked.name, expected=expected, fix=fix)
        return
    if asked.shard_size is not None and not (row and row.hybrid):
        yield _only_for("plugin.shard_size", asked.shard_size, "fsdp-hybrid")
    elif asked.shard_size is not None and asked.shard_size > 0 and scale.copies % asked.shard_size:
        sizes = ", ".join(str(n) for n in range(1, scale.copies + 1) if scale.copies % n == 0)
        key, value = "plugin.shard_size", asked.shard_size
        divided = [key for key in scale.mesh.above_one if key != "mesh.cp"]
        which = f"world size / {' / '.join(divided)} =" if divided else "the world size"
        expected = f"a divisor of {which} {scale.copies}"
        yield Problem(key=key, value=value, expected=expected, fix=f"one of {sizes}")
    if asked.chunk_size != "auto":
        if not (row and row.packed):
            yield _only_for("plugin.chunk_size", asked.chunk_size, "gemini")
        else:
            yield from check_size("plugin.chunk_size", asked.chunk_size, scale.memory_bytes)
    yield from _check_tiers(asked, row, scale, machine)
    for module, override in asked.overrides.items():
        yield from _check_override(module, override)


def _check_tiers(
    asked: Plugin, row: Row | None, scale: Scale, machine: Machine
) -> Iterator[Problem]:
    written = {
        f"plugin.budget.{f.name}": getattr(asked.budget, f.name)
        for f in dataclasses.fields(asked.budget)
    }
    given = {key: value for key, value in written.items() if value != "auto"}
    if asked.disk_path not in (None, "auto"):
        given["plugin.disk_path"] = asked.disk_path
    if row is None or row.packed:  # `auto` may end at gemini
        yield from check_budget(asked, scale, machine)
    else:
        yield from (_only_for(key, value, "gemini") for key, value in given.items())


def _only_for(key: str, value: Any, plugin: str) -> Problem:
    fix = f"remove it, or choose plugin={plugin}"
    return Problem(key=key, value=value, expected=f"nothing but under plugin={plugin}", fix=fix)


def _check_override(module: str, override: dict[str, Any]) -> Iterator[Problem]:
    key = f"plugin.overrides.{module}"
    for name in override:
        if name != "reshard":
            fix = suggest(name, ["reshard"])
            yield Problem(key=f"{key}.{name}", expected="reshard, the only known key", fix=fix)
    if not isinstance(override.get("reshard"), bool):
        fix = f"write plugin.overrides={{{module}:{{reshard:false}}}}"
        value = override.get("reshard")
        yield Problem(key=f"{key}.reshard", value=value, expected="true or false", fix=fix)
    found = re.fullmatch(r"(.+\.)?(\d+)-(\d+)", module)
    if found and not 0 <= int(found[3]) - int(found[2]) < MOST_BLOCKS:
        fix = f"as in {found[1] or ''}0-3"
        yield Problem(key=key, expected="a range from low to high", fix=fix)


def check_override_names(asked: Plugin, survey: Survey) -> Iterator[Problem]:
    """Problems of overrides that match no block, since only blocks are gathered separately."""
    blocks = list(dict.fromkeys(p.group for p in survey.parameters if p.group))
    for module in asked.overrides:
        if not any(overrides(module, block) for block in blocks):
            expected = "a block of the model, like blocks.0 or blocks.0-3"
            key = f"plugin.overrides.{module}"
            yield Problem(key=key, expected=expected, fix=suggest(module, blocks))
