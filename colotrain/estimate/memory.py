"""What a plan needs, in bytes per rank. Standard library only; `plan`'s shapes go in and out.

A step is walked through as the engine carries it out on `fully_shard` (torch/distributed/fsdp/
_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py of torch 2.13): the peak is the highest
moment of it, not the sum of each category's own maximum.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from colotrain.estimate.groups import Group, find
from colotrain.plan import Ledger, Level, OptimPlan, ParameterInfo, Segment, Survey, Trace
from colotrain.plugins import Row

STATE_BYTES = 4
"""Optimizer state is kept in fp32."""
LARGEST_SHARED_BYTES = 64 << 20
"""As in `engine.transport`: larger groups are exchanged through a window."""
WINDOW_BYTES = 4 << 20
"""As in `engine.channel`."""
_BLOCK = re.compile(r"^(.*?\.)?\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything about a plan that decides how much memory a rank needs."""

    row: Row
    shard: int
    """Ranks that share a copy of the model."""
    replicas: int = 1
    accumulation_steps: int = 1
    micro_batch: int = 1
    precision: str = "fp32"
    optim: OptimPlan
    device: str = "cpu"
    shared_memory: bool = False
    """The ranks of a shard group exchange through shared memory (CPU, one host)."""
    chunk_bytes: int | None = None
    reshard_overrides: dict[str, bool] = field(default_factory=dict)
    records_gradients: bool = False
    """Statistics of every gradient are recorded now and then, from copies of the shards."""
    snapshots: bool = False
    """Checkpoints are written from a copy while training goes on."""
    off_device_bytes: int = 0
    """Of parameters and optimizer state, what a plugin keeps in lower tiers."""
    baseline: int = 0


def predict(layout: Layout, survey: Survey, trace: Trace | None) -> Ledger:
    """The ledger of the moment in a step that needs the most memory, on the largest rank.

    `survey` with everything training that ever will. Without a trace, activations are left out.
    """
    return max(moments(layout, survey, trace), key=lambda ledger: ledger.total)


def moments(layout: Layout, survey: Survey, trace: Trace | None) -> Iterator[Ledger]:
    """Ledgers of the moments at which a run may need the most memory."""
    if trace is None:
        shown = model_state_bytes(layout.row, survey, layout.shard, layout.optim)
        yield dataclasses.replace(shown, baseline=layout.baseline)
        return
    step = _Step(layout, survey, trace)
    yield from step.start()
    yield from step.walk()
    yield from step.update()


class _Step:
    """The state of a rank's memory while a step is walked through."""

    def __init__(self, layout: Layout, survey: Survey, trace: Trace) -> None:
        self.layout, self.survey, self.trace = layout, survey, trace
        self.groups = find(survey, trace, layout)
        self.root = self.groups[""]
        self.of_block = {block: g for g in self.groups.values() for block in g.blocks}
        every = self.groups.values()
        self.parameters = sum(g.shard_bytes for g in every)
        trained = sum(g.trained_shard_numel for g in every)
        self.optimizer = trained * _state_bytes(layout.optim)
        kept = self.parameters + self.optimizer - layout.off_device_bytes
        self.optimizer = max(0, kept - self.parameters)
        self.gathered: set[str] = set()
        self.receiving = 0
        """A private all-gather buffer that is being held."""
        self.reducing = 0
        """A private reduce-scatter buffer that is being held."""
        self.reduced: set[str] = set()
        """Groups whose sharded gradients exist."""
        self.whole: dict[str, int] = {}
        """Group → bytes of its accumulated whole gradients."""
        self.shared = self._shared_bytes()

    def _shared_bytes(self) -> int:
        """Pages of shared memory that a rank touches: buffers, its part of its peers', windows."""
        layout, size = self.layout, self.layout.shard
        if not layout.shared_memory or size == 1:
            return 0
        every = list(self.groups.values())
        gather = max(
            (g.gathered_bytes for g in every if self._is_shared(g.gathered_bytes)), default=0
        )
        reduce = max(
            (g.reduced_bytes for g in every if self._is_shared(g.reduced_bytes)), default=0
        )
        large = any(
            not self._is_shared(n) for g in every for n in (g.gathered_bytes, g.reduced_bytes)
        )
        windows = size * WINDOW_BYTES if large else 0
        return 2 * gather + reduce + reduce * (size - 1) // size + windows

    def _is_shared(self, num_bytes: int) -> bool:
        return self.layout.shared_memory and num_bytes <= LARGEST_SHARED_BYTES

    def _private(self, num_bytes: int) -> int:
        """A collective's buffer, where it is not shared memory; one rank alone needs none."""
        if self.layout.shard == 1 or self._is_shared(num_bytes):
            return 0
        return num_bytes

    def ledger(
        self, level: Level, *, extra: int = 0, gradients: int = 0, gathered: int = 0
    ) -> Ledger:
        """The state now, with `level` of the trace and what comes on top for a moment."""
        layout, trace = self.layout, self.trace
        fixed, grows, block, root = level
        inputs = trace.input_bytes * layout.micro_batch
        sharded = sum(self.groups[name].trained_shard_bytes for name in self.reduced)
        snapshot = self.parameters + self.optimizer if layout.snapshots else 0
        return Ledger(
            parameters=self.parameters,
            gradients=sharded + sum(self.whole.values()) + block + root + gradients,
            optimizer=self.optimizer,
            activations=fixed + grows * layout.micro_batch + inputs,
            gathered=sum(self.groups[n].gathered_bytes for n in self.gathered) + gathered,
            buffers=trace.buffer_bytes
            + self.shared
            + self.receiving
            + self.reducing
            + extra
            + snapshot,
            baseline=layout.baseline,
        )

    def start(self) -> Iterator[Ledger]:
        """Building: models that cannot be built on the meta device are whole on every rank."""
        whole = sum(p.numel * p.itemsize for p in self.survey.parameters)
        largest = max((p.numel * p.itemsize for p in self.survey.parameters), default=0)
        held = whole if self.survey.built_whole else self.parameters + largest
        yield Ledger(
            parameters=held, buffers=self.trace.buffer_bytes, baseline=self.layout.baseline
        )

    def walk(self) -> Iterator[Ledger]:
        """The micro-batches of a step; what is between the first two and the last is like them."""
        num = self.layout.accumulation_steps
        for index in sorted({0, min(1, num - 1), num - 1}):
            yield from self._micro_batch(last=index == num - 1)

    def _micro_batch(self, *, last: bool) -> Iterator[Ledger]:
        forward = [s for s in self.trace.segments if s.phase == "forward"]
        backward = [s for s in self.trace.segments if s.phase == "backward"]
        yield from self._gather(self.root, forward[0].start)
        for index, segment in enumerate(forward):
            group = self.of_block.get(segment.block)
            if group is not None:
                yield from self._gather(group, segment.start)
            yield from map(self.ledger, segment.peaks)
            rest = {s.block for s in forward[index + 1 :]}
            if group is not None and not group.stays and not rest & set(group.blocks):
                self.gathered.discard(group.name)
        self.receiving = 0
        yield from self._backward(backward, last=last)

    def _gather(self, group: Group, level: Level) -> Iterator[Ledger]:
        """Forward: the last buffer is let go when the next group has arrived."""
        if group.name in self.gathered or not group.gathered_bytes:
            return
        buffer = self._private(group.gathered_bytes)
        yield self.ledger(level, extra=buffer)
        self.receiving = buffer
        self.gathered.add(group.name)
        yield self.ledger(level)

    def _backward(self, segments: list[Segment], *, last: bool) -> Iterator[Ledger]:
        order = list(
            dict.fromkeys(self.of_block[s.block].name for s in segments if s.block in self.of_block)
        )
        late: list[Group] = []
        self._prefetch(order[:1])
        for index, segment in enumerate(segments):
            group = self.of_block.get(segment.block)
            if group is not None and group.name not in self.gathered:
                self.gathered.add(group.name)
                yield self.ledger(segment.start)
            if group is not None:
                at = order.index(group.name)
                self._prefetch(order[at + 1 : at + 2])
            yield from map(self.ledger, segment.peaks)
            rest = {s.block for s in segments[index + 1 :]}
            if group is None or rest & set(group.blocks):
                continue
            if segment.reduced:
                yield from self._finish(group, segment.end, last=last)
            else:
                late.append(group)
        end = segments[-1].end
        yield from self._finish(self.root, end, last=last)
        end = (*end[:3], 0)
        for group in late:
            yield from self._finish(group, end, last=last)
        self.receiving = self.reducing = 0
        self.gathered = {n for n in self.gathered if self._is_kept(self.groups[n], last)}

    def _prefetch(self, names: list[str]) -> None:
        waiting = [self.groups[n] for n in names if n not in self.gathered]
        self.receiving = sum(self._private(g.gathered_bytes) for g in waiting)

    def _is_kept(self, group: Group, last: bool) -> bool:
        return group.stays and not last

    def _finish(self, group: Group, level: Level, *, last: bool) -> Iterator[Ledger]:
        """What `fully_shard` does when the backward of a group is over: free, reduce, keep."""
        num_bytes, before = group.reduced_bytes, self.whole.get(group.name, 0)
        without = (level[0], level[1], 0, level[3]) if group is not self.root else (*level[:3], 0)
        if not self._is_kept(group, last):
            self.gathered.discard(group.name)
        if not num_bytes:
            return
        if not (last or self.layout.row.gradients == "sharded"):
            self.whole[group.name] = group.trained_bytes
            converted = group.trained_bytes if self.layout.precision != "fp32" else 0
            yield self.ledger(level, gradients=converted if not before else 0)
            return
        self.reducing = 0
        buffer = self._private(num_bytes) or (num_bytes if self.layout.shard == 1 else 0)
        yield self.ledger(level, extra=buffer)
        self.whole.pop(group.name, None)
        divided = num_bytes if self.layout.shard == 1 else 0
        yield self.ledger(without, extra=buffer + divided, gradients=group.trained_shard_bytes)
        self.reducing = buffer
        self.reduced.add(group.name)

    def update(self) -> Iterator[Ledger]:
        """The optimizer's update, and the statistics of it."""
        rest = (0, 0, 0, 0)
        yield self.ledger(rest)
        if self.layout.records_gradients:
            trained = [p for p in self.survey.parameters if p.frozen_by is None]
            shards = [shard_numel(p, self.layout.shard) * p.itemsize for p in trained]
            yield self.ledger(rest, extra=sum(shards) + max(shards, default=0))


def model_state_bytes(row: Row, survey: Survey, shard: int, optim: OptimPlan) -> Ledger:
    """Parameters, gradients, optimizer state and gathered parameters on the largest rank.

    `shard` is how many ranks share one copy of the model. Frozen parameters have no gradient and
    no optimizer state. Activations and buffers are not in it.
    """
    parameters = survey.parameters
    trainable = [p for p in parameters if p.frozen_by is None]
    gradients_over = 1 if row.gradients == "whole" else shard
    return Ledger(
        parameters=sum(shard_numel(p, shard) * p.itemsize for p in parameters),
        gradients=sum(shard_numel(p, gradients_over) * p.itemsize for p in trainable),
        optimizer=sum(shard_numel(p, shard) for p in trainable) * _state_bytes(optim),
        gathered=_gathered_bytes(row, parameters),
    )


def shard_numel(parameter: ParameterInfo, shard: int) -> int:
    """Elements of the first shard; `fully_shard` cuts dimension 0 and rounds up."""
    if not parameter.shape:
        return parameter.numel
    rows = parameter.shape[0]
    return math.ceil(rows / shard) * (parameter.numel // max(1, rows))


def _state_bytes(optim: OptimPlan) -> int:
    """Per trainable element: Adam keeps two moments, SGD one if it has momentum.

    At most two are assumed of Muon, whose embeddings are AdamW's, and of the user's own.
    """
    if optim.name == "sgd":
        return STATE_BYTES if optim.betas and optim.betas[0] else 0
    return {"lion": 1, "adafactor": 0}.get(optim.name, 2) * STATE_BYTES


def _gathered_bytes(row: Row, parameters: Iterable[ParameterInfo]) -> int:
    """Whole parameters that live beside the shards.

    Kept through the step: all of them. Freed after use: approximately what no block holds, and
    the two largest blocks (the one in use and the one being fetched), told apart by their names.
    """
    groups: dict[str, int] = {}
    for parameter in parameters:
        found = _BLOCK.match(parameter.name)
        name = found[0] if found else ""
        groups[name] = groups.get(name, 0) + parameter.numel * parameter.itemsize
    if row.parameters_live == "step":
        return sum(groups.values())
    outside = groups.pop("", 0)
    return outside + sum(sorted(groups.values())[-2:])
