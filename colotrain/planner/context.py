"""What a plan is made from, and the memory and time that it takes under each plugin.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from colotrain.config.schema import Config
from colotrain.planner import measured_peaks
from colotrain.planner.hardware import Hardware
from colotrain.planner.layout import Layout, layout_of
from colotrain.planner.machine import Machine
from colotrain.planner.memory import Estimate, larger, non_model_bytes, predict
from colotrain.planner.offload import offloaded_estimate
from colotrain.planner.scale import Scale
from colotrain.planner.stages import Stage
from colotrain.planner.time import Part, chunk_shares, step_time
from colotrain.spec.axes import COPY, DP_SHARD, PP, MeshPlan
from colotrain.spec.batch import tokens_per_count
from colotrain.spec.memory import MemoryBreakdown, PeakRange, Verdict
from colotrain.spec.observing import ObservePlan
from colotrain.spec.plan import (
    BatchPlan,
    DataPlan,
    FreezePlan,
    ModelPlan,
    OptimPlan,
    PluginPlan,
    Prediction,
    Recompute,
    RunPlan,
    TrainPlan,
)
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plugin, layout and checkpointing for a plan, with the memory and time they need."""

    plugin: str
    mesh: MeshPlan
    layout: Layout
    checkpointing: Recompute
    memory: MemoryBreakdown
    peak: PeakRange
    time: Prediction
    verdict: Verdict

    @property
    def fits(self) -> bool:
        """Whether the run may start: true unless it certainly exceeds the memory."""
        return self.verdict != "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Settings in which nothing is wrong, and what they say of ranks, batch, model and data."""

    settings: Config
    scale: Scale
    batch: BatchPlan
    model: ModelPlan
    data: DataPlan
    freeze: FreezePlan
    survey: Survey
    """The whole model, undivided, as training begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext(Examined):
    """Everything that the choice of a plugin depends on."""

    stages: tuple[Stage, ...]
    """What ranks have of the model, which axes divide: one where there are no pipeline stages."""
    stage: Stage
    """The stage that memory is that of: the fullest under the plugin that was chosen."""
    train: TrainPlan
    optim: OptimPlan
    observe: ObservePlan
    machine: Machine
    hardware: Callable[[Layout], Hardware] | None
    """None: times are not known."""
    before: Callable[[Layout], Estimate] | None = None
    """Memory of a pass over the data before the first step; None: there is none."""
    changed_plan: Callable[[dict[str, Any]], RunPlan | None] = lambda changes: None
    """The plan with changed settings (dotted key → value); None where they are refused."""

    def of_stages(self) -> list[PlanningContext]:
        """Return the context of each pipeline stage."""
        return [replace(self, stage=stage) for stage in self.stages]

    def of_fullest_stage(self, plugin: PluginPlan) -> PlanningContext:
        """Return the context of the stage that needs most memory under `plugin`."""
        if len(self.stages) == 1:
            return self
        return max(self.of_stages(), key=lambda own: own.own_option(plugin).memory.total)

    def option(self, plugin: PluginPlan) -> Option:
        """Memory, on the fullest stage, and time of `plugin`; see `own_option`."""
        options = [own.own_option(plugin) for own in self.of_stages()]
        return max(options, key=lambda option: option.memory.total)

    def own_option(self, plugin: PluginPlan) -> Option:
        """Memory and time of `plugin`, without the memory that it offloads to lower tiers."""
        layout, survey, device = self.layout(plugin), self.stage.survey, self.scale.device
        recompute = self.train.activation_checkpointing
        need = self.own_need(layout, recompute)
        if plugin.budget is not None:
            trace = self.stage.traces(recompute, layout.micro_batch)
            transient = non_model_bytes(layout, survey, trace)
            lowered = offloaded_estimate(plugin, survey, self.optim, device, transient=transient)
            need = self.with_pass(layout, lowered) if lowered else need
        measured = measured_peaks.recall(self.shape(plugin))
        if measured is not None:
            beside = need.breakdown.baseline if device == "cuda" else 0  # no tensor, not measured
            need = measured_peaks.corrected(need, measured + beside)
        return self.option_of(plugin.name, layout, checkpointing=recompute, need=need)

    def option_of(
        self,
        plugin: str,
        layout: Layout,
        *,
        checkpointing: Recompute,
        need: Estimate | None = None,
    ) -> Option:
        """Memory, unless it is given as `need`, and time of a plugin in any layout."""
        need = need or self.need(layout, checkpointing=checkpointing)
        return Option(
            plugin=plugin,
            mesh=self.scale.mesh,
            layout=layout,
            checkpointing=checkpointing,
            memory=need.breakdown,
            peak=need.peak,
            time=self.time(layout, checkpointing=checkpointing),
            verdict=need.peak.verdict(self.scale.memory_bytes),
        )

    def need(self, layout: Layout, *, checkpointing: Recompute) -> Estimate:
        """Memory that a rank of the fullest stage needs in training, or in the pass before it."""
        needs = [own.own_need(its, checkpointing) for own, its in self.layouts(layout)]
        return max(needs, key=lambda need: need.breakdown.total)

    def own_need(self, layout: Layout, checkpointing: Recompute) -> Estimate:
        """Memory that a rank of the stage in `layout` needs."""
        trace = self.stage.traces(checkpointing, layout.micro_batch)
        return self.with_pass(layout, predict(layout, self.stage.survey, trace))

    def with_pass(self, layout: Layout, training: Estimate) -> Estimate:
        """`training`, or the memory of the pass before it if that is more."""
        return training if self.before is None else larger(training, self.before(layout))

    def time(self, layout: Layout, *, checkpointing: Recompute) -> Prediction:
        """Time of a step, in which the slowest pipeline stage counts; zeros where unknown."""
        parts: list[Part] = []
        shares: list[list[float]] = []
        for own, its in self.layouts(layout):
            trace = own.stage.traces(checkpointing, layout.micro_batch)
            if trace is None or self.hardware is None:
                return Prediction()
            parts.append((its, own.stage.survey, trace))
            shares.append(chunk_shares(trace, own.stage.chunk_of, layout.stage_chunks))
        assert self.hardware is not None
        per_count = tokens_per_count(self.data)
        return step_time(
            parts,
            self.hardware(layout),
            shares=shares,
            tokens_per_step=self.batch.tokens_per_step,
            flops_per_token=self.stage.survey.flops_per_token * per_count,
            world_size=self.scale.world,
        )

    def verdict(self, changes: dict[str, Any]) -> Verdict | None:
        """Whether the plan fits with changed settings; None where they are refused."""
        made = self.changed_plan(changes)
        return made.peak.verdict(made.cluster.memory_bytes) if made else None

    def shape(self, plugin: PluginPlan) -> str:
        """Key under which the measured peak of a run is stored for later plans."""
        layout = self.layout(plugin)
        return measured_peaks.shape_of(
            layout,
            self.stage.survey,
            self.stage.traces(self.train.activation_checkpointing, layout.micro_batch),
            plugin.budget,
            self.before(layout) if self.before else None,
            model=self.model,
            data=self.data,
            train=self.train,
            mesh=self.scale.mesh,
        )

    def layouts(self, layout: Layout) -> Iterator[tuple[PlanningContext, Layout]]:
        """Yield the context of each pipeline stage, with its own form of `layout`."""
        for own in self.of_stages():
            stage, sent = own.stage.number, own.stage.gradients_sent
            yield own, replace(layout, stage=stage, gradients_sent=sent)

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
            libraries=self.stage.survey.libraries,
        )
        mesh, sequence = self.scale.mesh, self.scale.sequence
        precision = PRECISIONS[self.train.precision]
        itemsize = precision.num_bytes if precision.is_cast else sequence.activation_itemsize
        near = ranks.has_neighbours_on_node(PP, procs_per_node=procs)
        parts = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
        return replace(
            layout,
            owners=ranks.size(*COPY),
            expert_ranks=mesh.ep,
            stages=mesh.pp,
            stage=self.stage.number,
            activation_bytes=sequence.activation_numel * itemsize // parts,
            stage_chunks=mesh.pp_chunks,
            gradients_sent=self.stage.gradients_sent,
            links_stages=near and self.scale.device == "cpu",
        )
