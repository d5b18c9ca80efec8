"""Optimizer steps whose tensors were recorded on every rank, so that checks can compare them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from colotrain.audit.evidence import Evidence, sketches
from colotrain.audit.ratios import Sketch, mean, near, ratio
from colotrain.audit.records import Details, ObservedStep

AVERAGED = "ranks step by themselves and have equal weights again later: they average weights"


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def step(self) -> ObservedStep:
        return self.steps[0]

    @property
    def num(self) -> int:
        return self.step.micro_batches

    def gradient(self, rank: int = 0) -> dict[str, Sketch]:
        """Return the sketches of one rank's gradient before clipping, by parameter."""
        own = self.details[rank]
        return sketches(own.gradient if own.before_clip is None else own.before_clip)

    def reference(self, kind: str) -> dict[str, Sketch]:
        """Return the mean over ranks of the field `kind` of `Details`: declared, base or last."""
        return mean([sketches(getattr(own, kind)) for own in self.details])

    @property
    def losses(self) -> int:
        """Number of losses per micro-batch whose backwards are called on lines of their own."""
        is_whole = near(ratio(self.gradient(), self.reference("base"))[0], 1.0)
        return 1 if is_whole else self.step.lines

    @property
    def clip(self) -> float:
        """Factor that clipping applied."""
        own = self.details[0]
        if own.before_clip is None:
            return own.engine_clip
        return ratio(sketches(own.gradient), sketches(own.before_clip))[0]


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
    found = []
    for number in by_rank[0]:
        if all(number in steps for steps in by_rank):
            steps, details = map(list, zip(*(own[number] for own in by_rank), strict=True))
            found.append(
                ComparedStep(steps=steps, details=details, usual=usual, made_at=made_at, held=held)
            )
    return found


def averages_weights(evidence: Evidence, compared: Sequence[ComparedStep]) -> bool:
    """Whether ranks changed their weights differently, and had equal ones again later."""
    differ = [e.step for e in compared if any(d.change != e.details[0].change for d in e.details)]
    if not differ:
        return False
    after = evidence.first.steps.index(differ[0]) + 1
    later = zip(*(rank.marks[after:] for rank in evidence.ranks), strict=False)
    return any(all(marks) and len(set(marks)) == 1 for marks in later)
