"""What the observed processes wrote, read back for the checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Literal

from colotrain.audit.ratios import Sketch, unpacked
from colotrain.audit.records import (
    Details,
    EngineInfo,
    Membership,
    ObservedEnd,
    ObservedProcess,
    ObservedStep,
    Remark,
    Sharding,
)
from colotrain.events.event import Event, Kind
from colotrain.events.log import read
from colotrain.rundir import RunDir


@dataclass(slots=True, kw_only=True)
class RankEvidence:
    """The records of one process that trained."""

    process: ObservedProcess
    steps: list[ObservedStep] = field(default_factory=list)
    members: list[Membership] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    engine: EngineInfo | None = None
    sharding: Sharding | None = None
    end: ObservedEnd | None = None

    @property
    def marks(self) -> list[str]:
        """Hashes of the weights before each step, and at the end."""
        return [*(step.mark for step in self.steps), *([self.end.mark] if self.end else [])]

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that step in turns; 1 where one follows another for good."""
        order = [step.optimizer for step in self.steps]
        in_turns = order != sorted(order) or min(Counter(order).values(), default=0) < 2
        return len(set(order)) if in_turns else 1

    def steps_with_details(self) -> Iterator[tuple[ObservedStep, Details]]:
        """Yield the steps of which tensors were recorded, with what was recorded."""
        for step in self.steps:
            if step.details is not None:
                yield step, details_of(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of an audited command."""

    ranks: list[RankEvidence]
    remarks: list[Remark]
    """Of all processes, also of those that made no step."""
    failures: list[str]

    @property
    def first(self) -> RankEvidence:
        return self.ranks[0]

    @property
    def world_size(self) -> int:
        return max((rank.process.world_size for rank in self.ranks), default=0)

    @property
    def has_all_ranks(self) -> bool:
        return len(self.ranks) == self.world_size


def details_of(step: ObservedStep) -> Details:
    return Details.of(Event(kind=Details.KIND, t=step.t, fields=step.details or {}))


def sketches(texts: dict[str, str] | None) -> dict[str, Sketch]:
    return {name: unpacked(text) for name, text in (texts or {}).items()}


ROUNDING = 1e-9
"""Difference of two sketches of one tensor, relative to its norm."""
BY_HAND = 0.01
"""Change between two steps that counts, as a share of the step's: less is rounding."""


def changed_between_steps(rank: RankEvidence, kind: Literal["frozen", "trainable"]) -> list[str]:
    """Parameters that have other values at a step than after the one before that was looked into.

    Trainable ones must be the optimizer's, and the steps follow each other.
    """
    found, after, moved, last = set[str](), dict[str, Sketch](), dict[str, float](), 0
    for (step, details), member in zip(rank.steps_with_details(), rank.members, strict=False):
        before, change = sketches(details.weights), sketches(details.change)
        if kind == "frozen" or step.step == last + 1:
            found |= {
                n
                for n in set(getattr(member, kind)).difference(member.missing)
                if n in before
                and n in after
                and math.dist(before[n], after[n])
                > ROUNDING * math.hypot(*after[n]) + BY_HAND * moved[n]
            }
        after = {n: [*map(add, v, change[n])] for n, v in before.items() if n in change}
        moved, last = {n: math.hypot(*v) for n, v in change.items()}, step.step
    return sorted(found)


def evidence(rundir: RunDir) -> Evidence:
    """Read what the processes of a command wrote; damaged lines are left out."""
    ranks: list[RankEvidence] = []
    remarks: list[Remark] = []
    for path in sorted(rundir.audit.glob("rank*.jsonl")):
        found, of_process = rank_of(path)
        remarks += of_process
        if found is not None and found.steps:
            ranks.append(found)
    ranks.sort(key=lambda rank: rank.process.rank)
    failures = [
        line
        for path in sorted(rundir.audit.glob("failures-*.txt"))
        for line in path.read_text("utf-8", "replace").splitlines()
    ]
    return Evidence(ranks=newest(ranks), remarks=remarks, failures=failures)


def newest(ranks: list[RankEvidence]) -> list[RankEvidence]:
    """Return one process per rank: the last that began, where a launcher started some again."""
    by_rank: dict[int, RankEvidence] = {}
    for found in ranks:
        known = by_rank.get(found.process.rank)
        if known is None or known.process.t < found.process.t:
            by_rank[found.process.rank] = found
    return list(by_rank.values())


def rank_of(path: Path) -> tuple[RankEvidence | None, list[Remark]]:
    """Return the records of a process, None if it did not train, and what it remarked."""
    events = read(path)

    def every(kind: type[Kind]) -> list[Kind]:
        return [kind.of(event) for event in events if event.kind == kind.KIND]

    def last(kind: type[Kind]) -> Kind | None:
        return next(reversed(every(kind)), None)

    process, remarks = last(ObservedProcess), every(Remark)
    if process is None:
        return None, remarks
    rank = RankEvidence(
        process=process,
        steps=every(ObservedStep),
        members=every(Membership),
        remarks=remarks,
        engine=last(EngineInfo),
        sharding=last(Sharding),
        end=last(ObservedEnd),
    )
    return rank, remarks
