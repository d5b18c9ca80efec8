"""Search over plugins, micro-batches and checkpointing for what fits, the fastest first.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from colotrain.errors import UsageError
from colotrain.planner.hardware import Hardware
from colotrain.planner.layout import Layout
from colotrain.planner.memory import Estimate, larger, predict
from colotrain.planner.time import Part, chunk_shares, step_time
from colotrain.spec.axes import MeshPlan
from colotrain.spec.memory import MemoryBreakdown, PeakRange, Verdict
from colotrain.spec.plan import Prediction, Recompute
from colotrain.spec.survey import Survey, Trace

MOST_SAMPLES = 1024
"""Largest micro-batch that is tried."""
TIE = 1.01
"""Ratio up to which predicted times count as equal; the option listed first is then taken."""

Traces = Callable[[Recompute, int], Trace | None]
"""(checkpointing, samples) → trace of a micro-batch."""


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
class SearchSpace:
    """Everything that is the same for all options."""

    survey: Survey
    """The model, with parameters that are unfrozen later counted as trained."""
    traces: Traces
    hardware: Callable[[Layout], Hardware] | None
    capacity: int
    global_batch: int
    tokens_per_step: int
    tokens_per_count: int
    world_size: int
    data_parallel: int
    """Ranks, or groups of ranks, that work on different samples."""
    mesh: MeshPlan = field(default_factory=MeshPlan)
    before: Callable[[Layout], Estimate] | None = None
    """Memory of a pass over the data before the first step; None: there is none."""
    stages: tuple[SearchSpace, ...] = ()
    """The same of each pipeline stage, each with its part of the model; empty without stages."""
    gradients_sent: int = 0
    """Chunks of the stage that send gradients back."""
    chunk_of: dict[str, int] = field(default_factory=dict)
    """Block → position of its chunk among the stage's; "" → that of what is in no block."""

    def need(self, layout: Layout, *, checkpointing: Recompute) -> Estimate:
        """Memory that a rank needs in training, or in the pass before it if that is more.

        Of pipeline stages the fullest counts.
        """
        needs = [space.own_need(own, checkpointing) for space, own in self.parts(layout)]
        return max(needs, key=lambda need: need.breakdown.total)

    def own_need(self, layout: Layout, checkpointing: Recompute) -> Estimate:
        """Memory that a rank of the stage in `layout` needs."""
        trace = self.traces(checkpointing, layout.micro_batch)
        return self.with_pass(layout, predict(layout, self.survey, trace))

    def parts(self, layout: Layout) -> Iterator[tuple[SearchSpace, Layout]]:
        """Yield each pipeline stage's part of the model with its layout; or all of it."""
        if not self.stages:
            yield self, layout
        for stage, space in enumerate(self.stages):
            yield space, replace(layout, stage=stage, gradients_sent=space.gradients_sent)

    def with_pass(self, layout: Layout, training: Estimate) -> Estimate:
        """`training`, or the memory of the pass before it if that is more."""
        return training if self.before is None else larger(training, self.before(layout))

    def option(
        self,
        plugin: str,
        layout: Layout,
        *,
        checkpointing: Recompute,
        need: Estimate | None = None,
    ) -> Option:
        """Memory, unless it is given as `need`, and time of a plugin."""
        need = need or self.need(layout, checkpointing=checkpointing)
        return Option(
            plugin=plugin,
            mesh=self.mesh,
            layout=layout,
            checkpointing=checkpointing,
            memory=need.breakdown,
            peak=need.peak,
            time=self.time(layout, checkpointing=checkpointing),
            verdict=need.peak.verdict(self.capacity),
        )

    def time(self, layout: Layout, *, checkpointing: Recompute) -> Prediction:
        """Time of a step, in which the slowest pipeline stage counts; zeros where unknown."""
        parts: list[Part] = []
        shares: list[list[float]] = []
        for space, own in self.parts(layout):
            trace = space.traces(checkpointing, layout.micro_batch)
            if trace is None or self.hardware is None:
                return Prediction()
            parts.append((own, space.survey, trace))
            shares.append(chunk_shares(trace, space.chunk_of, layout.stage_chunks))
        assert self.hardware is not None
        return step_time(
            parts,
            self.hardware(layout),
            shares=shares,
            tokens_per_step=self.tokens_per_step,
            flops_per_token=self.survey.flops_per_token * self.tokens_per_count,
            world_size=self.world_size,
        )

    def every(
        self, layouts: Iterable[tuple[str, Layout]], *, checkpointing: Iterable[Recompute]
    ) -> Iterator[Option]:
        """Each layout with each possible micro-batch and each kind of checkpointing."""
        ways = [recompute for recompute in checkpointing if self.can(recompute)]
        for plugin, layout in layouts:
            for size in self.micro_batches():
                steps = self.global_batch // (self.data_parallel * size)
                sized = replace(layout, micro_batch=size, accumulation_steps=steps)
                for recompute in ways:
                    yield self.option(plugin, sized, checkpointing=recompute)

    def can(self, recompute: Recompute) -> bool:
        """Whether the model can be traced with this kind of checkpointing."""
        try:
            return self.traces(recompute, 1) is not None
        except UsageError:
            return False

    def micro_batches(self) -> list[int]:
        share = self.global_batch // self.data_parallel
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        return [size for size in sizes if size & (size - 1) == 0] or sizes[:1]


def rank(options: Iterable[Option]) -> list[Option]:
    """Options that surely fit, the fastest first; without times in the order given."""
    return sorted((o for o in options if o.verdict == "yes"), key=lambda option: option.time.step_s)


def best(options: Sequence[Option]) -> Option | None:
    """The fastest option that surely fits; the first of equally fast ones.

    If none surely fits: of those that perhaps fit, the one with the least memory.
    """
    fitting = [option for option in options if option.verdict == "yes"]
    if not fitting:
        perhaps = [option for option in options if option.verdict == "tight"]
        return min(perhaps, key=lambda option: option.memory.total, default=None)
    limit = TIE * min(option.time.step_s for option in fitting)
    return next(option for option in fitting if option.time.step_s <= limit)


def largest_micro_batch(
    search_space: SearchSpace, layout: Layout, *, checkpointing: Recompute
) -> int:
    """The largest power of two that fits as micro-batch, for any global batch; 0 if none."""

    def has_room(size: int) -> bool:
        need = search_space.need(replace(layout, micro_batch=size), checkpointing=checkpointing)
        return need.peak.verdict(search_space.capacity) == "yes"

    if search_space.traces(checkpointing, 1) is None or not has_room(1):
        return 0
    size = 1
    while size < MOST_SAMPLES and has_room(2 * size):
        size = 2 * size
    return size
