"""Resolving the plugin: mesh, chunks, overrides per module, and the reason for the choice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from colotrain.config.schema import Plugin
from colotrain.config.sizes import check_size, parse_size
from colotrain.errors import Problem, suggest
from colotrain.planner import measured_peaks
from colotrain.planner.advise import TIE, Option, SearchSpace, best
from colotrain.planner.budget import (
    check_budget,
    check_space,
    find_budget,
    names_folder,
    why_no_disk,
)
from colotrain.planner.layout import Layout, layout_of
from colotrain.planner.machine import Machine
from colotrain.planner.memory import non_model_bytes
from colotrain.planner.offload import least_bytes, offloaded_estimate, predict
from colotrain.planner.scale import Scale
from colotrain.spec.axes import DP_SHARD, PP, Ranks
from colotrain.spec.memory import Verdict
from colotrain.spec.observing import ObservePlan
from colotrain.spec.offload import SAFETY
from colotrain.spec.packing import choose_chunk_bytes, units_of
from colotrain.spec.plan import (
    BatchPlan,
    DataPlan,
    ModelPlan,
    OptimPlan,
    PluginPlan,
    RunPlan,
    TrainPlan,
)
from colotrain.spec.plugins import AUTO_ORDER, ROWS, Row, overrides
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.quantities import format_seconds, format_size
from colotrain.spec.survey import Survey

MOST_BLOCKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """Everything that the choice of a plugin depends on."""

    scale: Scale
    search_space: SearchSpace
    """With pipeline stages, that of one stage."""
    stage: int = 0
    """The stage that memory and time are those of."""
    bytes_of_stages: tuple[int, ...] = ()
    """Planned peak of a rank of each stage; empty where there is one."""
    sent_by_stages: tuple[int, ...] = ()
    """Bytes of activations and gradients that a rank of each stage sends to others in a step."""
    model: ModelPlan
    data: DataPlan
    batch: BatchPlan
    train: TrainPlan
    optim: OptimPlan
    observe: ObservePlan
    machine: Machine
    changed_plan: Callable[[dict[str, Any]], RunPlan | None] = lambda changes: None
    """The plan with changed settings (dotted key → value); None where they are refused."""

    def stages(self) -> list[PlanningContext]:
        """Return the context of each pipeline stage; this one where there are none."""
        spaces = self.search_space.stages
        own = [dataclasses.replace(space, stages=spaces) for space in spaces]
        found = [dataclasses.replace(self, search_space=s, stage=n) for n, s in enumerate(own)]
        return found or [self]

    def option(self, plugin: PluginPlan) -> Option:
        """Memory, on the fullest stage, and time of `plugin`; see `own_option`."""
        options = [own.own_option(plugin) for own in self.stages()]
        return max(options, key=lambda option: option.memory.total)

    def own_option(self, plugin: PluginPlan) -> Option:
        """Memory and time of `plugin`, without the memory that it offloads to lower tiers."""
        layout = self.layout(plugin)
        recompute = self.train.activation_checkpointing
        survey, device = self.search_space.survey, self.scale.device
        need = self.search_space.own_need(layout, recompute)
        if plugin.budget is not None:
            trace = self.search_space.traces(recompute, layout.micro_batch)
            transient = non_model_bytes(layout, survey, trace)
            lowered = offloaded_estimate(plugin, survey, self.optim, device, transient=transient)
            need = self.search_space.with_pass(layout, lowered) if lowered else need
        measured = measured_peaks.recall(self.shape(plugin))
        if measured is not None:
            beside = need.breakdown.baseline if device == "cuda" else 0  # no tensor, not measured
            need = measured_peaks.corrected(need, measured + beside)
        return self.search_space.option(plugin.name, layout, checkpointing=recompute, need=need)

    def verdict(self, changes: dict[str, Any]) -> Verdict | None:
        """Whether the plan fits with changed settings; None where they are refused."""
        made = self.changed_plan(changes)
        return made.peak.verdict(made.cluster.memory_bytes) if made else None

    def shape(self, plugin: PluginPlan) -> str:
        """Key under which the measured peak of a run is stored for later plans."""
        layout, search_space = self.layout(plugin), self.search_space
        trace = search_space.traces(self.train.activation_checkpointing, layout.micro_batch)
        before = search_space.before(layout) if search_space.before else None
        return measured_peaks.shape_of(
            layout,
            search_space.survey,
            trace,
            plugin.budget,
            before,
            model=self.model,
            data=self.data,
            train=self.train,
            mesh=self.scale.mesh,
        )

    def plan_plugin(
        self, name: str, asked: Plugin | None = None, *, reason: str = ""
    ) -> PluginPlan:
        """Plan of the plugin `name`, with the settings `asked` for or its defaults.

        gemini gets a disk tier in the run's own folder where memory might not suffice, if the disk
        has room for everything that memory cannot hold.
        """
        asked = asked or Plugin()
        survey, split = self._largest_survey(), can_split(self.train)
        plan = _plan_plugin(
            name, asked, self.scale, survey, self.machine, reason=reason, split=split
        )
        staged = self.scale.mesh.pp > 1
        if not ROWS[name].packed or staged or why_no_disk(asked) or names_folder(asked):
            return plan
        if asked.budget.host == "auto" and self.option(plan).verdict == "yes":
            return plan
        budget = find_budget(asked, self.scale, self.machine, with_disk=True)
        lowered = dataclasses.replace(plan, budget=budget)
        _, placement, _ = predict(lowered, survey, self.optim, self.scale.device)
        has_room = budget is None or placement.need["disk"] <= budget.disk_bytes
        return lowered if has_room else plan

    def _largest_survey(self) -> Survey:
        """Return the model, or the part of the stage with most parameters, for all stages alike."""
        surveys = [space.survey for space in self.search_space.stages or (self.search_space,)]
        return max(surveys, key=lambda survey: sum(p.numel for p in survey.parameters))

    def layout(self, plugin: PluginPlan) -> Layout:
        every, steps = self.observe.grads_every, self.train.max_steps
        procs = self.scale.procs_per_node
        ranks = plugin.arrange(self.scale.mesh, world=self.scale.world)
        layout = layout_of(
            plugin,
            self.batch,
            optim=self.optim,
            precision=self.train.precision,
            device=self.scale.device,
            on_one_node=ranks.on_one_node(DP_SHARD, procs_per_node=procs),
            records_gradients=0 < every <= steps,
            libraries=self.search_space.survey.libraries,
        )
        mesh, sequence = self.scale.mesh, self.scale.sequence
        precision = PRECISIONS[self.train.precision]
        itemsize = precision.num_bytes if precision.is_cast else sequence.activation_itemsize
        near = ranks.has_neighbours_on_node(PP, procs_per_node=procs)
        return dataclasses.replace(
            layout,
            stages=mesh.pp,
            stage=self.stage,
            activation_bytes=sequence.activation_numel * itemsize // mesh.cp,
            stage_chunks=mesh.pp_chunks,
            gradients_sent=self.search_space.gradients_sent,
            links_stages=near and self.scale.device == "cpu",
        )


def can_split(train: TrainPlan) -> bool:
    """Whether blocks may be split: not where checkpointing or compile wraps a block's forward."""
    return train.activation_checkpointing == "none" and not train.compile


def decide(asked: Plugin, context: PlanningContext) -> tuple[PluginPlan, Option]:
    """Plan of a plugin that `check_plugin` accepts, and the memory and time it needs.

    `auto` takes the fastest that fits; where times are unknown, the first that fits.
    """
    scale = context.scale
    if asked.name != "auto":
        plugin = context.plan_plugin(asked.name, asked, reason="asked for")
        return plugin, context.option(plugin)
    names = [n for n in AUTO_ORDER if not ROWS[n].hybrid or scale.nodes > 1]
    plugins = {name: context.plan_plugin(name, asked) for name in names}
    options = [context.option(plugins[name]) for name in names]
    if not context.search_space.capacity:
        least = min(reversed(options), key=lambda option: option.memory.total)
        reason = "the memory of a rank is not known: what needs least of it"
        return dataclasses.replace(plugins[least.plugin], reason=reason), least
    plain = [o for o in options if o.verdict == "yes" and not ROWS[o.plugin].packed]
    chosen = best(plain or options)  # gemini only where nothing simpler fits
    reason = explain(chosen, options, context.search_space.capacity)
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


def _row(name: str, reshard: bool | None) -> Row:
    if reshard is None:
        return ROWS[name]
    return dataclasses.replace(ROWS[name], parameters_live="use" if reshard else "step")


def _mesh(name: str, asked: Plugin, scale: Scale) -> tuple[int, ...]:
    largest = scale.ranks.largest_shard(procs_per_node=scale.procs_per_node)
    shard = asked.shard_size or largest if ROWS[name].hybrid else None
    return Ranks.of(scale.mesh, world=scale.world, shard=shard).data_sizes


def _plan_plugin(
    name: str,
    asked: Plugin,
    scale: Scale,
    survey: Survey,
    machine: Machine,
    *,
    reason: str,
    split: bool,
) -> PluginPlan:
    row = _row(name, asked.reshard)
    chunk_bytes = None
    if row.packed:
        if asked.chunk_size == "auto":
            units = units_of(survey.parameters, split=split)
            chunk_bytes = choose_chunk_bytes(units, state_bytes=_state_bytes(survey, scale))
        else:
            chunk_bytes = parse_size(asked.chunk_size, whole=scale.memory_bytes)
    return PluginPlan(
        name=name,
        reason=reason,
        parameters_live=row.parameters_live,
        gradients=row.gradients,
        mesh=_mesh(name, asked, scale),
        chunk_bytes=chunk_bytes,
        split_blocks=row.packed and split,
        reshard_overrides={module: bool(o["reshard"]) for module, o in asked.overrides.items()},
        # no tiers under pipeline stages, whose placements would differ
        budget=find_budget(asked, scale, machine) if row.packed and scale.mesh.pp == 1 else None,
    )


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


def check_room(
    asked: Plugin, plugin: PluginPlan, survey: Survey, optim: OptimPlan, scale: Scale
) -> Iterator[Problem]:
    """Problems of budgets the user set that cannot hold one group, or of a disk that is too small.

    Automatic budgets need no check: the plan's verdict covers them.
    """
    if plugin.budget is None:
        return
    sizes, placement, _ = predict(plugin, survey, optim, scale.device, safety=SAFETY)
    top = "host" if scale.device == "cpu" else "device"
    room = plugin.budget.host_bytes if top == "host" else plugin.budget.device_bytes
    least = least_bytes(sizes, plugin)
    if room < least and getattr(asked.budget, top) != "auto":
        expected = f"at least {format_size(least)} for the largest group at work"
        fix = f"raise plugin.budget.{top}, or lower plugin.chunk_size"
        yield Problem(
            key=f"plugin.budget.{top}", value=format_size(room), expected=expected, fix=fix
        )
    if names_folder(asked) or asked.budget.disk != "auto":
        yield from check_space(plugin.budget, placement.need["disk"], scale)


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
