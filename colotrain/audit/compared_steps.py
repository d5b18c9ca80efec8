"""Optimizer steps whose tensors were recorded on every rank, so that checks can compare them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from colotrain.audit.evidence import Evidence, sketches
from colotrain.audit.ratios import CLOSE, Sketch, differs, mean, near, norm, ratio
from colotrain.audit.records import TENSOR_PARALLEL, Details, ObservedStep

AVERAGED = "ranks step by themselves and have equal weights again later: they average weights"


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """One optimizer step whose details every rank recorded."""

    steps: list[ObservedStep]
    """The step as each rank saw it."""
    details: list[Details]
    """One per rank."""
    usual: int
    """Number of micro-batches that most steps of the run have."""
    made_at: list[str]
    """Site at which the optimizer was made."""
    held: frozenset[str]
    """Parameters that the optimizer has itself, and not copies of them."""
    parts: Mapping[str, list[list[int]]]
    """Parameter of which ranks have different parts → the ranks that have each part."""
    is_parallel: bool
    """Whether ranks have different parts of parameters while they use them."""

    @property
    def step(self) -> ObservedStep:
        return self.steps[0]

    @property
    def num(self) -> int:
        return self.step.micro_batches

    @cached_property
    def losses_of(self) -> list[list[int]]:
        """The ranks that compute each of the losses whose mean the step is for."""
        return together(self.steps, self.details) if self.is_parallel else alone(self.details)

    @property
    def readers_apart(self) -> list[int]:
        """Ranks that share matrices by parts, and have different inputs; empty if none do."""
        inputs = [tuple(own.inputs) for own in self.details]
        return next((g for g in self.losses_of if len({inputs[r] for r in g}) > 1), [])

    @property
    def has_one_update(self) -> bool:
        """Whether all ranks changed all of their weights by the same, and by more than nothing."""
        changes = [own.change for own in self.details]
        return all(each == changes[0] for each in changes) and norm(sketches(changes[0])) > 0

    @property
    def has_one_model(self) -> bool:
        """Whether all ranks have parameters of the same names, and backwards of losses alone."""
        names = [own.weights.keys() for own in self.details]
        stages = {bool(own.why_not) for own in self.details}
        return len(stages) == 1 and all(each == names[0] for each in names)

    @property
    def num_losses(self) -> int:
        return len(self.losses_of)

    def parts_of(self, name: str) -> list[list[int]]:
        """Return the ranks that have each part of a parameter; one list if all have the whole."""
        return self.parts.get(name) or [list(range(len(self.details)))]

    def key(self, name: str, ranks: Sequence[int]) -> str:
        """Return the name of the part that these ranks have."""
        return name if 0 in ranks else f"{name} (rank {ranks[0]})"

    def gradient(self, rank: int = 0) -> dict[str, Sketch]:
        """Return the sketches of one rank's gradient before clipping, by parameter."""
        own = self.details[rank]
        return sketches(own.gradient if own.before_clip is None else own.before_clip)

    def gradients(self) -> dict[str, Sketch]:
        """Return the sketches of rank 0's gradient, and of the parts that others have."""
        found = self.gradient()
        for name, each in self.parts.items():
            for ranks in each:
                gradient = self.gradient(ranks[0])
                if name in gradient:
                    found[self.key(name, ranks)] = gradient[name]
        return found

    def reference(self, kind: str) -> dict[str, Sketch]:
        """Return the mean over losses of the field `kind` of `Details`: declared, base or last.

        Ranks that compute one loss have summands of its gradient, or are copies of one another.
        """
        own = [sketches(getattr(each, kind)) for each in self.details]
        if not self.is_parallel:
            return mean(own)
        found = {}
        for name in own[0]:
            for ranks in self.parts_of(name) if all(name in each for each in own) else ():
                of_each = (
                    whole([own[rank][name] for rank in group if rank in ranks])
                    for group in self.losses_of
                )
                sums = map(sum, zip(*filter(None, of_each), strict=True))
                found[self.key(name, ranks)] = [value / self.num_losses for value in sums]
        return found

    @property
    def losses(self) -> int:
        """Number of losses per micro-batch whose backwards are called on lines of their own."""
        is_whole = near(ratio(self.gradients(), self.reference("base"))[0], 1.0)
        return 1 if is_whole else self.step.lines

    @property
    def clip(self) -> float:
        """Factor that clipping applied."""
        own = self.details[0]
        if own.before_clip is None:
            return own.engine_clip
        return ratio(sketches(own.gradient), sketches(own.before_clip))[0]


def alone(details: Sequence[Details]) -> list[list[int]]:
    return [[rank] for rank in range(len(details))]


def together(steps: Sequence[ObservedStep], details: Sequence[Details]) -> list[list[int]]:
    """Return groups of ranks that compute one loss: of the same inputs, with the same value."""
    found: list[list[int]] = []
    for rank, own in enumerate(details):
        for group in found:
            first, losses = details[group[0]], steps[group[0]].losses
            same = own.inputs == first.inputs and all(own.inputs)
            same = same and len(losses) == len(steps[rank].losses) > 0
            same = same and all(map(near, steps[rank].losses, losses))
            if rank in first.peers if own.peers or first.peers else same:
                group.append(rank)
                break
        else:
            found.append([rank])
    return found


def whole(summands: Sequence[Sketch]) -> Sketch:
    """Return the sum of what ranks have of a gradient, or one of them if they are copies."""
    if all(differs(other, summands[0]) <= CLOSE for other in summands[1:]):
        return summands[0] if summands else []
    return [sum(values) for values in zip(*summands, strict=True)]


def parts(steps: Sequence[ObservedStep], details: Sequence[Details]) -> dict[str, list[list[int]]]:
    """Return the parameters that ranks have different parts of, and the ranks that have each.

    Their weights differ, and they compute one loss together, or exchange the gradients of others
    alone. Where nothing is exchanged, or everything, weights differ by mistake.
    """
    found: dict[str, list[list[int]]] = {}
    exchanged = set[str]()
    for name in details[0].weights:
        by_weights: dict[str | None, list[int]] = {}
        for rank, own in enumerate(details):
            by_weights.setdefault(own.weights.get(name), []).append(rank)
        gradients = {own.gradient.get(name) for own in details}
        if len(gradients) == 1 and gradients != {None} and norm(sketches(details[0].gradient)):
            exchanged.add(name)
        if len(by_weights) > 1 and None not in by_weights:
            found[name] = list(by_weights.values())
    if len(together(steps, details)) < len(details):
        return found
    if not exchanged - found.keys():
        return {}
    return {name: ranks for name, ranks in found.items() if name not in exchanged}


def compared_steps(evidence: Evidence) -> list[ComparedStep]:
    """Return the steps of the first optimizer whose details every rank recorded."""
    by_rank = [
        {s.step: (s, d) for s, d in rank.steps_with_details() if s.optimizer == 0}
        for rank in evidence.ranks
    ]
    member = next(iter(evidence.first.members), None)
    made_at, held = ["", ""], frozenset[str]()
    if member is not None:
        made_at = member.made_at
        if member.complete and not member.foreign:
            held = frozenset(member.trainable) - frozenset(member.missing)
    ((usual, _),) = Counter(step.micro_batches for step in evidence.first.steps).most_common(1)
    every = [number for number in by_rank[0] if all(number in steps for steps in by_rank)]
    both = [[*zip(*(own[number] for own in by_rank), strict=True)] for number in every]
    known = parts(*both[0]) if both else {}
    is_parallel = bool(known) or any(own.peers for _, details in both for own in details)
    return [
        ComparedStep(
            steps=[*steps],
            details=summed_alike(details),
            usual=usual,
            made_at=made_at,
            held=held,
            parts=known,
            is_parallel=is_parallel or evidence.first.process.framework == TENSOR_PARALLEL,
        )
        for steps, details in both
    ]


def summed_alike(details: Sequence[Details]) -> list[Details]:
    """Return details in which no sum counts as its own mean where others of the step are sums.

    The number of the step's targets may happen to be that of one micro-batch's elements.
    """
    kinds = {count[0] for own in details for count in own.counts if count is not None}
    if not {"none", "summed"} <= kinds:
        return [*details]
    found = []
    for own in details:
        counts, factors = [*own.counts], [*own.factors]
        for place, count in enumerate(counts):
            if count is not None and count[0] == "none" and len(count) > 3:
                counts[place] = ["summed", *count[1:3]]
                factors[place] = [*factors[place], count[3]]
        found.append(replace(own, counts=counts, factors=factors))
    return found


def averages_weights(evidence: Evidence, compared: Sequence[ComparedStep]) -> bool:
    """Whether ranks changed their weights differently, and had equal ones again later."""
    differ = [e.step for e in compared if any(d.change != e.details[0].change for d in e.details)]
    if not differ:
        return False
    after = evidence.first.steps.index(differ[0]) + 1
    later = zip(*(rank.marks[after:] for rank in evidence.ranks), strict=False)
    return any(all(marks) and len(set(marks)) == 1 for marks in later)
