"""Steps that all ranks looked into, as the checks compare them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from colotrain.audit.evidence import Evidence, sketches
from colotrain.audit.ratios import Sketch, mean, near, ratio
from colotrain.audit.records import Details, ObservedStep

AVERAGED = "ranks step by themselves and have equal weights again later: they average weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One step that all ranks looked into."""

    step: ObservedStep
    details: list[Details]
    """One per rank."""
    steps: list[ObservedStep]
    usual: int
    """Micro-batches of most steps."""
    made_at: list[str]
    """Site at which the optimizer was made."""

    @property
    def num(self) -> int:
        return self.step.micro_batches

    def gradient(self, rank: int = 0) -> dict[str, Sketch]:
        """The gradient before clipping."""
        own = self.details[rank]
        return sketches(own.gradient if own.before_clip is None else own.before_clip)

    def reference(self, kind: str) -> dict[str, Sketch]:
        """The ranks' mean of `declared`, `base` or `last`."""
        return mean([sketches(getattr(own, kind)) for own in self.details])

    @property
    def losses(self) -> int:
        """Losses of a micro-batch that are backpropagated one by one, each on a line of its own."""
        is_whole = near(ratio(self.gradient(), self.reference("base"))[0], 1.0)
        return 1 if is_whole else self.step.lines

    @property
    def clip(self) -> float:
        """Factor that clipping applied."""
        own = self.details[0]
        if own.before_clip is None:
            return own.engine_clip
        return ratio(sketches(own.gradient), sketches(own.before_clip))[0]


def looked_into(evidence: Evidence) -> list[Looked]:
    """Return the steps of the first optimizer that all ranks looked into."""
    by_rank = [
        {s.step: (s, d) for s, d in rank.looked_into() if s.optimizer == 0}
        for rank in evidence.ranks
    ]
    made_at = next((member.made_at for member in evidence.first.members), ["", ""])
    ((usual, _),) = Counter(step.micro_batches for step in evidence.first.steps).most_common(1)
    found = []
    for number in by_rank[0]:
        if all(number in steps for steps in by_rank):
            steps, details = map(list, zip(*(own[number] for own in by_rank), strict=True))
            found.append(
                Looked(step=steps[0], steps=steps, details=details, usual=usual, made_at=made_at)
            )
    return found


def averages_weights(looked: Sequence[Looked]) -> bool:
    """Whether ranks had different weights before a step, and equal ones before a later one."""
    differ = False
    for each in looked:
        first, *others = (own.weights for own in each.details)
        equal = all(own == first for own in others)
        if differ and equal:
            return True
        differ = differ or not equal
    return False
