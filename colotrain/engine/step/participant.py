"""What takes part in the steps of a run, and what it asks of all ranks in a step's one all-reduce.

A participant owns its state and its own rules of when it has something to do. The step
(`step.train`) knows nothing of it but four moments:

1. `before_forward`: the step has begun, and none of its micro-batches is computed.
2. `asks`: the micro-batches are computed, and the ranks are about to meet. What is asked here is
   answered from all ranks, without a further collective.
3. `before_update`: gradients, loss and answers are known, the weights are those of the step before.
4. `after_step`: the update is done and counted; the next step has not begun.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from colotrain.engine.state.run_state import Run
from colotrain.engine.step.batches import Batches
from colotrain.engine.step.clock import StepClock


class Ask(Protocol):
    """A question to all ranks, whose answer follows from sums over the ranks."""

    def terms(self) -> list[float]:
        """Return what this rank adds to the sums; equally many on every rank."""

    def answer(self, sums: list[float], world: int) -> Any:
        """Return the answer, the same on every rank, from the sums over `world` ranks."""


@dataclass(frozen=True, slots=True)
class Any_:
    """Whether it is true on any rank."""

    value: bool

    def terms(self) -> list[float]:
        return [float(self.value)]

    def answer(self, sums: list[float], world: int) -> bool:
        return sums[0] > 0


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all ranks."""

    value: float

    def terms(self) -> list[float]:
        return [self.value]

    def answer(self, sums: list[float], world: int) -> float:
        return sums[0] / world


@dataclass(frozen=True, slots=True)
class Same:
    """Whether all ranks of each pipeline stage have the same number, an integer of few bits.

    Numbers are equal where the square of their sum is their number times the sum of their squares.
    """

    value: int
    stage: int
    num_stages: int
    ranks: int
    """Ranks of a stage."""

    def terms(self) -> list[float]:
        found = [0.0] * (2 * self.num_stages)
        found[self.stage], found[self.num_stages + self.stage] = self.value, self.value**2
        return found

    def answer(self, sums: list[float], world: int) -> bool:
        totals, squares = sums[: self.num_stages], sums[self.num_stages :]
        return all(t**2 == s * self.ranks for t, s in zip(totals, squares, strict=True))


def answers_of(asks: Mapping[str, Ask], sums: list[float], world: int) -> dict[str, Any]:
    """Return name → answer, from the sums of all terms over `world` ranks."""
    rest = iter(sums)
    return {
        name: ask.answer(list(itertools.islice(rest, len(ask.terms()))), world)
        for name, ask in asks.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know of a step before its update."""

    loss: float
    tokens: float
    odd: float
    """Micro-batches of the first step whose count may be none (`StepTotals.odd`); else 0."""
    grad_norm: float
    answers: Mapping[str, Any]
    """Name of an ask → its answer."""
    batches: Batches = field(repr=False)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def __getitem__(self, name: str) -> Any:
        """Return the answer to the ask `name`."""
        return self.answers[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A finished step."""

    agreed: Agreed
    lr: float | None
    """Learning rate of the update; None where the step was skipped."""
    stops: bool
    """Whether the run stops here: it saves, and does nothing else any more."""


class Participant:
    """Takes part in training; a subclass overrides the moments in which it has something to do.

    Every rank has the same participants in the same order (`participants.ORDER`).
    """

    def __init__(self, run: Run, clock: StepClock) -> None:
        self.run, self.clock = run, clock

    def before_forward(self, batches: Batches) -> None:
        """Act before the first forward of a step, with the weights of the step before."""

    def asks(self) -> Mapping[str, Ask]:
        """Return name → what to ask of all ranks, the same names on every rank."""
        return {}

    def before_update(self, agreed: Agreed) -> None:
        """Act on what the ranks agreed on, before the weights change."""

    def after_step(self, result: StepResult | None) -> None:
        """Act between two steps; `result` is None before the first one and after a rollback."""
