"""Typed records of single events: failures, checkpoints, steps, non-finite numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from colotrain.events.log import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of one rank (`failed`)."""

    rank: int
    attempt: int
    t: float
    phase: str
    step: int
    error: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.phase or 'unknown phase'}, step {self.step}: {self.error}"

    @staticmethod
    def of(event: Event) -> Failure:
        return Failure(
            rank=event.rank or 0,
            attempt=event.attempt or 0,
            t=event.t,
            phase=event.text("phase"),
            step=event.count("step"),
            error=event.text("error"),
            traceback=event.text("traceback"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was saved (`checkpoint`) or resumed from (`resumed`)."""

    step: int
    path: str
    seconds: float | None
    """Seconds that saving took; None if it was only resumed from."""
    stall_s: float | None = None
    """Seconds of `seconds` during which training stood still."""
    t: float
    """Unix time at which it was saved or resumed from."""

    @staticmethod
    def of(event: Event) -> Checkpoint:
        step, path = event.count("step"), event.text("path")
        seconds, stall_s = event.number("seconds"), event.number("stall_s")
        stall_s = seconds if stall_s is None else stall_s
        return Checkpoint(step=step, path=path, seconds=seconds, stall_s=stall_s, t=event.t)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """Progress within a step or evaluation that takes long (`progress`)."""

    step: int
    """Step that is being computed, or after which the evaluation runs."""
    what: str
    """"step" or "evaluation"."""
    micro_batch: int
    """Micro-batch that is being computed, from 1."""
    micro_batches: int
    done: float
    """Fraction that is done, between 0 and 1."""
    seconds: float
    """Seconds since the step or evaluation began."""
    t: float
    """Unix time of this report."""

    @property
    def whole_s(self) -> float | None:
        """Estimated total seconds at the rate so far; None while nothing is done."""
        return self.seconds / self.done if self.done > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds from `t` to the end; None while nothing is done."""
        return None if self.whole_s is None else max(0.0, self.whole_s - self.seconds)

    @staticmethod
    def of(event: Event) -> StepProgress:
        return StepProgress(
            step=event.count("step"),
            what=event.text("what") or "step",
            micro_batch=event.count("micro_batch"),
            micro_batches=event.count("micro_batches"),
            done=min(max(event.number("done") or 0.0, 0.0), 1.0),
            seconds=event.number("seconds") or 0.0,
            t=event.t,
        )


class Step(NamedTuple):
    """Rank 0's record of one step (`step`)."""

    attempt: int
    step: int
    t: float
    loss: float | None
    tokens: float | None
    """Targets summed over all ranks: tokens, samples, or what the model counts."""
    tokens_per_s: float | None
    grad_norm: float | None
    clip_ratio: float | None
    lr: float | None
    step_s: float | None
    data_s: float | None
    compute_s: float | None
    """Seconds in forward and backward, with the collectives inside them."""
    reduce_s: float | None
    """Seconds of waiting for the other ranks."""
    optimizer_s: float | None
    optimizer_steps: int
    micro_batches: int
    skipped: bool

    @staticmethod
    def of(event: Event) -> Step:
        return Step(
            attempt=event.attempt or 0,
            step=event.count("step"),
            t=event.t,
            loss=event.number("loss"),
            tokens=event.number("tokens"),
            tokens_per_s=event.number("tokens_per_s"),
            grad_norm=event.number("grad_norm"),
            clip_ratio=event.number("clip_ratio"),
            lr=event.number("lr"),
            step_s=event.number("step_s"),
            data_s=event.number("data_s"),
            compute_s=event.number("compute_s"),
            reduce_s=event.number("reduce_s"),
            optimizer_s=event.number("optimizer_s"),
            optimizer_steps=event.count("optimizer_steps"),
            micro_batches=event.count("total_micro_batches"),
            skipped=event.fields.get("skipped") is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite:
    """Origin of the first non-finite number (`nonfinite`)."""

    parameter: str | None
    module: str | None
    rank: int | None
    """Rank where it arose; None if a second pass over the step found nothing."""
    step: int
    micro_batch: int | None
    """Micro-batch within the step, from 1."""
    phase: str

    @staticmethod
    def of(event: Event) -> Nonfinite:
        return Nonfinite(
            parameter=event.text("parameter") or None,
            module=event.text("module") or None,
            rank=event.count("rank") if event.number("rank") is not None else None,
            step=event.count("step"),
            micro_batch=event.count("micro_batch") or None,
            phase=event.text("phase"),
        )

    def __str__(self) -> str:
        """Return text like `blocks.1.mlp in backward of step 5, rank 1, micro-batch 3`."""
        if self.rank is None:
            return f"step {self.step}, in which a second pass met nothing"
        what = self.module or self.parameter or "the model itself"
        return f"{what} in {self.phase} of step {self.step}, rank {self.rank}{self._batch()}"

    def _batch(self) -> str:
        return f", micro-batch {self.micro_batch}" if self.micro_batch else ""


def metrics_of(event: Event | None) -> dict[str, float]:
    """Return the metrics that the model returned beside the loss in an evaluation (`eval`)."""
    found = event.fields.get("metrics") if event is not None else None
    if not isinstance(found, dict):
        return {}
    return {str(name): float(value) for name, value in found.items()}
