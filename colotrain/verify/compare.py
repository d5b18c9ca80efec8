"""Comparing a plugin's trajectory with the reference's, and naming the first difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colotrain.plan import RunPlan
from colotrain.verify.reference import Tensors, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a plugin may be from the reference, each relative to the largest reference value
    of its kind in the step (at least 1 for losses and parameters)."""

    loss: float = 1e-6
    gradient: float = 1e-6
    parameter: float = 1e-6

    @staticmethod
    def for_precision(precision: str) -> Tolerance:
        """What rounding in the compute precision explains; weights stay in their own."""
        limit = {"fp32": 1e-6, "bf16": 3e-2, "fp16": 4e-3}[precision]
        return Tolerance(loss=limit, gradient=limit, parameter=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One plugin × world size × accumulation × freeze set against the reference."""

    plugin: str
    world_size: int
    accumulation_steps: int
    freeze: tuple[str, ...]
    max_abs_loss: float
    max_abs_gradient: float
    max_abs_parameter: float
    optimizer_steps: int
    expected_optimizer_steps: int
    frozen_unchanged: bool
    difference: str | None
    """The first thing that differs: what, in which parameter and step; None when nothing does."""

    @property
    def passed(self) -> bool:
        return self.difference is None


def compare(
    plan: RunPlan, reference: Trajectory, found: Trajectory, tolerance: Tolerance
) -> CaseResult:
    """Every loss, gradient and parameter of every step, the step count, and frozen bytes."""
    check = _Check(reference, found)
    for step in range(len(reference.losses)):
        check.numbers("loss", step, reference.losses[step], found.losses, tolerance.loss)
        check.tensors("gradient", step, reference.gradients, found.gradients, tolerance.gradient)
        check.tensors(
            "parameter", step + 1, reference.parameters, found.parameters, tolerance.parameter
        )
        check.frozen(step + 1)
    check.steps()
    return CaseResult(
        plugin=plan.plugin.name,
        world_size=plan.world_size,
        accumulation_steps=plan.batch.accumulation_steps,
        freeze=plan.freeze.patterns,
        max_abs_loss=check.largest["loss"],
        max_abs_gradient=check.largest["gradient"],
        max_abs_parameter=check.largest["parameter"],
        optimizer_steps=found.optimizer_steps,
        expected_optimizer_steps=reference.optimizer_steps,
        frozen_unchanged=check.frozen_unchanged,
        difference=check.difference,
    )


class _Check:
    """Collects the largest differences, and the first that is too large."""

    def __init__(self, reference: Trajectory, found: Trajectory) -> None:
        self.reference, self.found = reference, found
        self.largest = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
        self.frozen_unchanged = True
        self.difference: str | None = None

    def differs(self, text: str) -> None:
        self.difference = self.difference or text

    def numbers(
        self, kind: str, step: int, wanted: float, found: list[float], limit: float
    ) -> None:
        if step >= len(found):
            return self.differs(f"{kind} of step {step + 1}: missing")
        distance = abs(found[step] - wanted)
        self._measure(kind, distance)
        if not distance <= limit * max(1.0, abs(wanted)):
            self.differs(f"{kind} of step {step + 1}: {found[step]:.9g}, reference {wanted:.9g}")
        return None

    def tensors(
        self, kind: str, step: int, wanted: list[Tensors], found: list[Tensors], limit: float
    ) -> None:
        shown = step + 1 if kind == "gradient" else step
        if step >= len(found):
            return self.differs(f"{kind}s of step {shown}: missing")
        floor = 1.0 if kind == "parameter" else 0.0
        scale = max([floor, *(_max_abs(t) for t in wanted[step].values())])
        for name in sorted(found[step].keys() | wanted[step].keys()):
            distance = _distance(wanted[step].get(name), found[step].get(name))
            self._measure(kind, distance)
            if not distance <= limit * scale:
                self.differs(f"{kind} of {name} in step {shown}: differs by {distance:.3g}")
        return None

    def frozen(self, step: int) -> None:
        if step >= len(self.found.parameters):
            return
        start, now = self.reference.parameters[0], self.found.parameters[step]
        for name in sorted(self.reference.frozen):
            if not _same_bytes(start[name], now[name]):
                self.frozen_unchanged = False
                self.differs(f"frozen parameter {name} changed in step {step}")
        for name in sorted(self.reference.frozen ^ self.found.frozen):
            state = "is not frozen" if name in self.reference.frozen else "is frozen"
            self.differs(f"parameter {name} {state} in step {step}")

    def steps(self) -> None:
        wanted, found = self.reference.optimizer_steps, self.found.optimizer_steps
        if wanted != found:
            self.differs(f"optimizer stepped {found} times, reference {wanted}")

    def _measure(self, kind: str, distance: float) -> None:
        worst = self.largest[kind]
        self.largest[kind] = distance if math.isnan(distance) else max(worst, distance)


def _distance(wanted: Tensor | None, found: Tensor | None) -> float:
    """Largest |wanted - found|; a tensor that is absent counts as zeros."""
    if wanted is None and found is None:
        return 0.0
    if wanted is None or found is None:
        return _max_abs(wanted if found is None else found)  # type: ignore[arg-type]
    if wanted.shape != found.shape:
        return math.inf
    return _max_abs(wanted.double() - found.double())


def _max_abs(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def to_json(results: list[CaseResult], tolerance: Tolerance) -> dict[str, Any]:
    """The document that `verify --json` prints."""
    from dataclasses import asdict

    cases = []
    for result in results:
        case = asdict(result)
        case["freeze"] = list(result.freeze)
        cases.append({**case, "passed": result.passed})
    return {
        "passed": all(result.passed for result in results),
        "reference": "single process",
        "tolerance": asdict(tolerance),
        "cases": cases,
    }
