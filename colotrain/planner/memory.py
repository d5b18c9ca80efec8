"""Memory that a plan needs, in bytes per rank. Standard library only.

The allocations of a step are simulated in the order in which the engine makes them on `fully_shard`
of torch 2.13: those of autograd, and those of each group's gather, reduction and release. The peak
is the largest sum of live tensors; `allocations` adds the freed memory that malloc keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from colotrain.planner.allocations import RANGE, AllocationCounter
from colotrain.planner.communication import owned_matrices
from colotrain.planner.gpu_margin import gpu_margin_bytes, workspace_bytes
from colotrain.planner.groups import Group, fetched_ahead, find, shard_numel
from colotrain.planner.layout import Layout
from colotrain.planner.memory_changes import MemoryChange, memory_changes
from colotrain.planner.model_states import Transient, model_state_bytes, optimizer_bytes
from colotrain.spec.cpu_memory import (
    LARGEST_BUFFER_BYTES,
    MOST_WRITTEN_BYTES,
    NUM_SLOTS,
    WINDOW_BYTES,
)
from colotrain.spec.memory import MemoryBreakdown, PeakRange
from colotrain.spec.survey import Survey, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A rank's memory in a plan: the breakdown of its peak, and the range around the peak."""

    breakdown: MemoryBreakdown
    peak: PeakRange


def predict(layout: Layout, survey: Survey, trace: Trace | None) -> Estimate:
    """Estimate the peak memory of the rank that needs most.

    In `survey` parameters that are unfrozen later count as trained. Without a trace, activations
    are left out of the breakdown, and the range's upper end is twice its lower end.
    """
    if trace is None:
        rest = {"baseline": layout.baseline, "buffers": workspace_bytes(layout)}
        breakdown = dataclasses.replace(model_state_bytes(layout, survey), **rest)
        total = breakdown.total
        return Estimate(breakdown=breakdown, peak=PeakRange(exact=total, low=total, high=2 * total))
    allocations = AllocationCounter(on_cpu=layout.device == "cpu")
    _StepSimulation(layout, survey, trace, allocations).run()
    kept = allocations.resident() - allocations.fullest
    at = {**allocations.at_fullest, "buffers": allocations.at_fullest["buffers"] + kept}
    breakdown = dataclasses.replace(MemoryBreakdown(**at), baseline=layout.baseline)
    beside = gpu_margin_bytes(layout) if layout.device == "cuda" else 0
    return Estimate(
        breakdown=breakdown,
        peak=around(breakdown.total, exact=allocations.fullest + layout.baseline, beside=beside),
    )


def larger(a: Estimate, b: Estimate) -> Estimate:
    """The one with the higher peak, its range widened to hold the other's."""
    most = max(a, b, key=lambda estimate: estimate.breakdown.total)
    bounds = {n: max(getattr(a.peak, n), getattr(b.peak, n)) for n in ("exact", "low", "high")}
    return Estimate(breakdown=most.breakdown, peak=PeakRange(**bounds))


def around(num_bytes: int, *, exact: int, share: float = RANGE, beside: int = 0) -> PeakRange:
    """Range of a peak that is estimated as `num_bytes`, of which `exact` are certain.

    At most `beside` bytes come to it, of libraries and of the allocator.
    """
    low, high = round(num_bytes * (1 - share)), round(num_bytes * (1 + share)) + beside
    return PeakRange(exact=exact, low=max(exact, low), high=high)


def non_model_bytes(layout: Layout, survey: Survey, trace: Trace | None) -> Transient:
    """What a step holds beside parameters, sharded gradients and optimizer state, at its peak."""
    if trace is None:
        return Transient(activations=0, gathered=None)
    on_cpu, allocations = layout.device == "cpu", AllocationCounter(on_cpu=False)
    _StepSimulation(layout, survey, trace, allocations, keeps_states=on_cpu).run()
    if on_cpu:
        return Transient(activations=allocations.most["activations"], gathered=None)
    activations = allocations.at_fullest["activations"]

    def staged(below: Collection[str]) -> int:
        counter = AllocationCounter(on_cpu=False)
        _StepSimulation(layout, survey, trace, counter, keeps_states=False, below=below).run()
        return max(0, counter.fullest - allocations.fullest)

    gathered = allocations.fullest - activations
    beside = gpu_margin_bytes(layout)
    return Transient(activations=activations, gathered=gathered, beside=beside, staged=staged)


class _StepSimulation:
    """Simulates the allocations of two steps of a rank.

    Without `keeps_states` parameters, sharded gradients and optimizer state are left out. The
    groups named in `below` rest below the GPU: their shards are copied up together for a gather,
    sharded gradients to be added to, and down once they are reduced.
    """

    def __init__(
        self,
        layout: Layout,
        survey: Survey,
        trace: Trace,
        allocations: AllocationCounter,
        *,
        keeps_states: bool = True,
        below: Collection[str] = (),
    ) -> None:
        self.keeps_states, self.below = keeps_states, below
        self.adds = False  # whether the micro-batch adds to the gradients of an earlier one
        self.layout, self.survey, self.trace, self.allocations = layout, survey, trace, allocations
        self.groups = find(survey, trace, layout)
        self.root = self.groups[""]
        self.of_block = {block: g for g in self.groups.values() for block in g.blocks}
        self.sizes = trace.storages
        self.gathered: set[str] = set()
        self.kept_gradients: dict[str, list[object]] = {}
        """Group → unsharded gradients that are kept until the last micro-batch."""
        self.unreduced: dict[str, list[object]] = {}
        """Group → unsharded gradients of this backward."""
        self.handed_over: dict[str, list[object]] = {}
        """Group → gradients of a single rank, which became the sharded ones."""
        self.pending_reduction: tuple[Group, list[object]] | None = None
        """Group whose gradients are summed after the next group's (shared memory)."""
        ordered = sorted(trace.segments, key=lambda segment: segment.phase == "backward")
        each = list(
            zip(ordered, memory_changes(ordered, trace, on_cpu=allocations.on_cpu), strict=True)
        )
        self.forward = [(s, parts) for s, parts in each if s.phase == "forward"]
        self.backward = [(s, parts) for s, parts in each if s.phase == "backward"]
        self.count = 0

    def run(self) -> None:
        for simulate in (self.build, self.step, self.step):
            simulate()

    def build(self) -> None:
        """Allocate what lasts; models that cannot be built on the meta device begin unsharded."""
        if self.keeps_states:
            self._build_states()
        self.allocations.begin("buffers", "buffers", self.trace.buffer_bytes, lasts=True)
        self.allocations.begin("shared", "buffers", self.shared_bytes(), lasts=True)
        self.allocations.begin("cuBLAS", "buffers", workspace_bytes(self.layout), lasts=True)
        waiting = (self.layout.in_flight - 1) * (self.trace.kept_bytes + self.trace.input_bytes)
        self.allocations.begin("in flight", "activations", waiting, lasts=True)

    def _build_states(self) -> None:
        layout, allocations, groups = self.layout, self.allocations, list(self.groups.values())
        parameters = self.survey.parameters
        whole = sum(p.numel * p.itemsize for p in parameters)
        largest = max((p.numel * p.itemsize for p in parameters), default=0)
        shards = sum(g.shard_bytes for g in groups)
        if self.survey.built_whole:
            allocations.begin("whole", "parameters", max(0, whole - shards), lasts=True)
        allocations.begin("shards", "parameters", shards, lasts=True)
        allocations.begin("initial", "buffers", largest, lasts=True)
        allocations.end("initial")
        allocations.end("whole")
        moments = optimizer_bytes(layout, [p for p in parameters if p.frozen_by is None])
        allocations.begin("moments", "optimizer", moments, lasts=True)

    def shared_bytes(self) -> int:
        """Bytes of shared memory that a rank touches: its buffers, parts of others', windows."""
        size, links = self.layout.shard, self.layout.link_bytes
        if not self.layout.shared_memory or size == 1:
            return links
        gathers = [g.gathered_bytes for g in self.groups.values()]
        gather = max((n for n in gathers if n <= LARGEST_BUFFER_BYTES), default=0)
        windows = size * WINDOW_BYTES if max(gathers) > LARGEST_BUFFER_BYTES else 0
        part = max(g.reduced_bytes for g in self.groups.values()) // size
        written = min(part * (size - 1) * NUM_SLOTS, MOST_WRITTEN_BYTES)
        return links + gather + windows + 2 * written  # it reads as much as it writes

    def _private(self, num_bytes: int) -> int:
        """Bytes of a collective's buffer that are not in shared memory."""
        shared = self.layout.shared_memory and num_bytes <= LARGEST_BUFFER_BYTES
        return 0 if shared else num_bytes

    def step(self) -> None:
        num = self.layout.accumulation_steps
        for group in self.groups.values():  # the previous step's gradients
            self.allocations.end(("gradients", group.name))
            self.allocations.end(*self.handed_over.pop(group.name, []))
        for index in sorted({0, min(1, num - 1), num - 1}):
            self.adds = index > 0
            self.micro_batch(last=index == num - 1)
        if self.layout.records_gradients:
            self._record()
        if needed := owned_matrices(self.layout, self.survey).needed_bytes:
            self.allocations.begin("update", "buffers", needed)
            self.allocations.end("update")

    def _record(self) -> None:
        """Gradient statistics: copies of the shards, and the difference of one at a time."""
        trained = [p for p in self.survey.parameters if p.frozen_by is None]
        sizes = [shard_numel(p, self.layout.shard) * p.itemsize for p in trained]
        made = {("made", i): n for i, n in enumerate([*sizes, max(sizes, default=0)])}
        for key, num_bytes in made.items():
            self.allocations.begin(key, "buffers", num_bytes)
        self.allocations.end(*made)

    def _input_bytes(self) -> int:
        """Bytes of a micro-batch, with what its loss needs to know of the global batch's others."""
        layout = self.layout
        ranks = layout.shard * layout.replicas
        others = layout.micro_batch * (ranks * layout.accumulation_steps - 1)
        return self.trace.input_bytes + int(others * self.trace.row_bytes)

    def micro_batch(self, *, last: bool) -> None:
        self.count += 1
        self.allocations.end("leaving")
        self.allocations.begin("inputs", "activations", self._input_bytes())
        self._fetch(self.root)
        self._arrive(self.root)
        for index, (segment, parts) in enumerate(self.forward):
            group = self.of_block.get(segment.block)
            if group is not None and group.name not in self.gathered:
                self._fetch(group)
                self._arrive(group, frees=False)
            self._play(parts, in_backward=False)
            rest = {s.block for s, _ in self.forward[index + 1 :]}
            if group is not None and not group.stays and not rest & set(group.blocks):
                self._free(group)
        for name in self.groups:
            self.allocations.end(("received", name))
        self._backward(last=last)
        self.allocations.end("inputs")

    def _play(self, parts: Iterable[MemoryChange | int], *, in_backward: bool) -> None:
        """Allocate and free what autograd and the model's own code do in a segment."""
        allocations, owners = self.allocations, self.trace.gradients
        allocations.in_backward = in_backward
        for part in parts:
            if isinstance(part, int):
                self._gradient(part, self.of_block.get(owners[part], self.root))
            else:
                allocations.replay(part, "activations")
        allocations.in_backward = False

    def _gradient(self, number: int, group: Group) -> None:
        """Allocate a gradient, which is added to one that is kept already."""
        kept = self.kept_gradients.get(group.name)
        if kept and self.layout.precision == "fp32":
            self.allocations.begin("added", "activations", self.sizes[number])
            self.allocations.end("added")
            return
        key = ("gradient", number, self.count)
        self.allocations.begin(key, "activations", self.sizes[number])
        self.unreduced.setdefault(group.name, []).append(key)

    def _fetch(self, group: Group) -> None:
        """Start an all-gather into a buffer, which lives until parameters are copied out of it."""
        if self.layout.shard > 1 and group.name not in self.gathered:
            copied = 0 if self.keeps_states else self._copied(group)
            self.allocations.begin("copied", "buffers", copied)
            self.allocations.begin(
                ("received", group.name), "buffers", self._private(group.gathered_bytes)
            )
            self.allocations.end("copied")

    def _arrive(self, group: Group, *, frees: bool = True) -> None:
        """Copy parameters out of the buffer, which `fully_shard` keeps in forward until the next
        group arrives, unless it is in shared memory."""
        if group.name in self.gathered:
            return
        if not frees:
            for name in self.groups:
                if name != group.name:
                    self.allocations.end(("received", name))
        if self._is_below(group) and self.layout.shard == 1:
            self.allocations.begin("copied", "buffers", self._copied(group))
        for index, num_bytes in enumerate(group.gathered_sizes):
            self.allocations.begin(("whole", group.name, index), "gathered", num_bytes)
        self.allocations.end("copied")
        self.gathered.add(group.name)
        if self.layout.shared_memory or (frees and group is not self.root):
            self.allocations.end(("received", group.name))

    def _is_below(self, group: Group) -> bool:
        """Whether a group, or a part of its cut up block, rests below the GPU."""
        known_as = (group.name, *group.blocks)
        return any(
            n in known_as or n.startswith(tuple(f"{b}." for b in group.blocks)) for n in self.below
        )

    def _copied(self, group: Group) -> int:
        """Bytes of a group's shards on the GPU for their gather, and in the compute dtype."""
        cast = self._is_below(group) and self.layout.precision != "fp32"
        return group.shard_bytes + cast * group.gathered_bytes // self.layout.shard

    def _free(self, group: Group) -> None:
        for index in range(len(group.gathered_sizes)):
            self.allocations.end(("whole", group.name, index))
        self.gathered.discard(group.name)

    def _backward(self, *, last: bool) -> None:
        blocks = [s.block for s, _ in self.backward if s.block in self.of_block]
        order = [self.groups[n] for n in dict.fromkeys(self.of_block[b].name for b in blocks)]
        ahead = fetched_ahead(self.groups, self.trace)
        order += [self.groups[ahead]] if ahead else []
        late: list[Group] = []
        for group in order[:1]:
            self._fetch(group)
        for index, (segment, parts) in enumerate(self.backward):
            found = self.of_block.get(segment.block)
            if found is not None and found.name not in self.gathered:
                self._arrive(found)
            if found is not None:
                at = order.index(found)
                for group in order[at + 1 : at + 2]:
                    if ("received", group.name) not in self.allocations.alive:
                        self._fetch(group)
            self._play(parts, in_backward=True)
            rest = {s.block for s, _ in self.backward[index + 1 :]}
            if found is None or rest & set(found.blocks):
                continue
            if segment.reduced:
                self._finish(found, last=last)
            else:
                late.append(found)
        for group in (self.root, *late):
            self._finish(group, last=last)
        for name in self.groups:
            self.allocations.end(("received", name), ("reduced", name))
        if self.pending_reduction is not None:
            self._sum(*self.pending_reduction)
            self.pending_reduction = None
        for name in set(self.gathered):
            if last or not self.groups[name].stays:
                self._free(self.groups[name])

    def _finish(self, group: Group, *, last: bool) -> None:
        """Free, reduce or keep, as `fully_shard` does at the end of a group's backward."""
        fresh = self.unreduced.pop(group.name, [])
        for key in fresh:
            self.allocations.become(key, "gradients")
        if last or not group.stays:
            self._free(group)
        if not group.reduced_bytes:
            return
        if not (last or self.layout.gradients == "sharded"):
            self._keep(group, fresh)
            return
        kept = self.kept_gradients.pop(group.name, [])
        if self.layout.is_single_rank and not self._is_below(group):
            self._hand_over(group, fresh, kept)
            return
        whole = [*fresh, *kept]
        if self.layout.shared_memory and self.layout.shard > 1:
            before, self.pending_reduction = self.pending_reduction, (group, whole)
            if before is not None:
                self._sum(*before)
            return
        for name in self.groups:  # at most one buffer of a reduction is held
            self.allocations.end(("reduced", name))
        stages = self._is_below(group) and self.adds
        if stages:
            self.allocations.begin("staged", "gradients", group.trained_shard_bytes)
        self.allocations.begin(("reduced", group.name), "buffers", group.reduced_bytes)
        self.allocations.end(*whole)
        sharded = ("gradients", group.name)
        is_first = self.keeps_states and sharded not in self.allocations.alive
        place: object = sharded if is_first else "sum"
        self.allocations.begin(place, "gradients", group.reduced_bytes // self.layout.shard)
        if self.layout.shard == 1:  # the divided copy
            self.allocations.begin("divided", "buffers", group.reduced_bytes)
            self.allocations.end("divided")
        self.allocations.end("sum")
        if stages:  # until the next group's are there
            self.allocations.end("leaving", "staged")
            self.allocations.begin("leaving", "gradients", group.trained_shard_bytes)

    def _hand_over(self, group: Group, fresh: list[object], kept: list[object]) -> None:
        """Let a single rank's gradients, or their casts, be the sharded ones, or add them there."""
        is_cast, gone = self.layout.precision != "fp32", [*fresh, *kept]
        if self.keeps_states and group.name not in self.handed_over:
            self.handed_over[group.name] = stays = kept if is_cast else gone
            if not stays:
                sharded = ("gradients", group.name)
                self.allocations.begin(sharded, "gradients", group.trained_shard_bytes)
            gone = fresh if is_cast else []
        self.allocations.end(*gone)

    def _sum(self, group: Group, whole: list[object]) -> None:
        """Sum gradients as `sharding.reduce_scatter`: into new tensors, or into existing ones."""
        key, pieces = ("gradients", group.name), group.trained_pieces
        if key not in self.allocations.alive:
            size, begin = group.reduced_bytes // self.layout.shard, self.allocations.begin
            begin(key, "gradients", size, pieces=pieces, after_backward=True)
        self.allocations.end(*whole)

    def _keep(self, group: Group, fresh: list[object]) -> None:
        """Keep unsharded gradients as they are, or sum them in the dtype of reduction."""
        if self.layout.precision == "fp32":
            self.kept_gradients.setdefault(group.name, []).extend(fresh)
            return
        if group.name not in self.kept_gradients:
            key = ("summed", group.name, self.count)
            self.allocations.begin(key, "gradients", group.trained_bytes)
            self.kept_gradients[group.name] = [key]
        self.allocations.end(*fresh)
