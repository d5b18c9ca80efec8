"""Comparing a plugin's trajectory with the reference's, and naming the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.step.evaluation import RESERVED
from colotrain.records import same_fields
from colotrain.spec.objectives import EmbedPlan
from colotrain.spec.optimizers import is_in_a_layer, optimizer_of
from colotrain.spec.plan import RunPlan
from colotrain.spec.precisions import PRECISIONS, Precision
from colotrain.verify.cases import Case
from colotrain.verify.reference import distance, max_abs, widened
from colotrain.verify.trajectory import Trajectory

DRAWS = (
    "the model draws random numbers in its forward, beside torch.nn's dropout: turn that off, for "
    "what is drawn depends on how a batch is cut, and a difference proves nothing"
)
MIXES = (
    "{} makes the samples of a micro-batch depend on one another, as batch normalization does: "
    "results then depend on how a batch is cut, here and under plain torch (docs/promise.md)"
)


NO_MEAN = (
    "a metric that is no mean over samples or targets depends on how a batch is cut: return "
    "(sum, count) for it"
)
INITIAL_LIMIT = 1e-6
"""Largest difference of an initial value, relative to the parameter's largest: a decomposition may
round otherwise with another number of threads."""
FLIPS = 1e-3
"""`Tolerance.flips` of a state of 8 bits: of 10^5 numbers about one is so close to a middle."""

TURNS = 0.1
"""`Tolerance.update` of an optimizer that makes matrices orthogonal in bfloat16: another last bit
of a gradient turns a number halfway between two, and five iterations magnify what that adds to the
smallest singular values, of which small batches have many, by up to 3.4 each."""
ZERO_ROUNDING = 16
"""Multiple of plain torch's error that a gradient may differ by where it is smaller than that error
itself: it is 0, as an attention's bias of keys has it, and what is computed is rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest differences allowed between a plugin and the reference.

    The limit of a loss is relative to the loss, or to `terms` if that is more; that of a gradient
    to the largest value among all gradients of the step, and much smaller where the gradient itself
    is small, so that a vanished gradient is noticed. The limit of a parameter is absolute in fp32,
    and in half precision relative to the largest change since the beginning. Twice the rounding
    error of plain torch is always allowed: AdamW turns a gradient of mere rounding into a whole
    step.
    """

    loss: float = 1e-6
    terms: float = 1.0
    """Size of the numbers whose difference the loss is, and which are rounded."""
    gradient: float = 1e-6
    parameter: float = 1e-6
    parameter_floor: float = 1.0
    own_gradient: float | None = None
    """Limit relative to the gradient's own largest value; None: derived from `gradient`."""
    update: float = 0.0
    """Share of its own largest change in a step by which a matrix of a layer may differ, where the
    optimizer makes updates orthogonal in few bits: see `TURNS`."""
    flips: float = 0.0
    """Share of a parameter's elements that may differ by up to one step, where the optimizer rounds
    its state to few numbers: halfway between two, rounding elsewhere decides for one of them."""

    @staticmethod
    def explained_by(
        precision: str, dtypes: Iterable[torch.dtype], computed_in: Iterable[torch.dtype] = ()
    ) -> Tolerance:
        """Differences that rounding explains in the compute precision, in the parameters' `dtypes`,
        and in the dtypes that the forward computes in by itself, for example with autocast.

        The coarsest of them counts for all: a block in half precision changes the loss, and the
        gradients of float32 blocks before it. Where only autocast brings half precision, plain
        torch's measured rounding contains it, and `own_gradient` is a smaller limit.
        """
        known = _coarsest(precision, dtypes)
        coarsest = max(known, _coarsest(precision, computed_in), key=lambda p: p.tolerance)
        limit, floor = coarsest.tolerance, 0.0 if coarsest.is_cast else 1.0
        return Tolerance(
            loss=limit,
            gradient=limit,
            parameter=limit,
            parameter_floor=floor,
            own_gradient=None if coarsest == known else limit,
        )


def _coarsest(precision: str, dtypes: Iterable[torch.dtype]) -> Precision:
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    present = [p for n, p in PRECISIONS.items() if n == precision or p.dtype in names]
    return max(present, key=lambda p: p.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult(Case):
    """One case, a plugin on some ranks, against the reference."""

    freeze: tuple[str, ...]
    max_abs_loss: float
    max_abs_gradient: float
    max_abs_parameter: float
    optimizer_steps: int
    expected_optimizer_steps: int
    frozen_unchanged: bool
    tolerance: Tolerance
    difference: str | None
    """First difference: its kind, parameter and step; None where there is none."""
    draws: bool = False
    """Whether the model's forward draws random numbers, so that a difference proves nothing."""
    not_exact: str = ""
    """Why the reference did not compute in float64; empty where it did."""
    zero_gradients: int = 0
    """Number of parameters whose gradient was zero in every step, which prove little."""

    @property
    def passed(self) -> bool:
        return self.difference is None


def compare(
    plan: RunPlan, reference: Trajectory, found: Trajectory, tolerance: Tolerance | None = None
) -> CaseResult:
    """Compare every step's loss, gradients, parameters and frozen bytes, and the step count.

    Without a `tolerance`, it follows from the precisions of the plan, of the model's parameters and
    of its forward.
    """
    if tolerance is None:
        dtypes = (value.dtype for value in reference.parameters[0].values())
        tolerance = Tolerance.explained_by(plan.train.precision, dtypes, reference.computed_in)
    optimizer = optimizer_of(plan.optim.name)
    if optimizer.blocks is not None:
        tolerance = replace(tolerance, flips=FLIPS)
    if optimizer.orthogonalizes:
        tolerance = replace(tolerance, update=TURNS)
    if isinstance(plan.model.objective, EmbedPlan):
        scale = max(1.0, plan.model.objective.scale)  # exponentials magnify rounding as much
        tolerance = replace(tolerance, terms=scale, gradient=tolerance.gradient * scale)
    check = _Check(reference, found, step_size=plan.optim.lr)
    check.parameters(0, tolerance)
    for step in range(len(reference.losses)):
        check.loss(step, tolerance)
        check.gradients(step, tolerance)
        check.parameters(step + 1, tolerance)
        check.frozen(step + 1)
    check.steps()
    check.evaluation(tolerance)
    return CaseResult(
        plugin=plan.plugin.name,
        world_size=plan.world_size,
        **same_fields(plan.mesh, Case),
        accumulation_steps=plan.batch.accumulation_steps,
        freeze=plan.freeze.patterns,
        max_abs_loss=check.largest["loss"],
        max_abs_gradient=check.largest["gradient"],
        max_abs_parameter=check.largest["parameter"],
        optimizer_steps=found.optimizer_steps,
        expected_optimizer_steps=reference.optimizer_steps,
        frozen_unchanged=check.frozen_unchanged,
        tolerance=tolerance,
        difference=_explained(check.difference, reference),
        draws=reference.draws,
        not_exact=reference.not_exact,
        zero_gradients=_num_zero(reference),
    )


def _num_zero(reference: Trajectory) -> int:
    """Return how many parameters had a gradient in some step, and none but zeros in any."""
    seen = {name for step in reference.gradients for name in step}
    moved = (n for step in reference.gradients for n, grad in step.items() if max_abs(grad) > 0)
    return len(seen.difference(moved))


def _explained(difference: str | None, reference: Trajectory) -> str | None:
    """Put before a difference what in the model explains it."""
    why = MIXES.format(reference.mixes) if reference.mixes else reference.no_mean
    why = DRAWS if reference.draws else why
    return f"{why} ({difference})" if why and difference else difference


class _Check:
    """Collects the largest differences, and the first that exceeds its limit."""

    def __init__(self, reference: Trajectory, found: Trajectory, *, step_size: float) -> None:
        self.reference, self.found, self.step_size = reference, found, step_size
        self.largest = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
        self.frozen_unchanged = True
        self.difference: str | None = None

    def differs(self, text: str) -> None:
        self.difference = self.difference or text

    def loss(self, step: int, tolerance: Tolerance) -> None:
        if step >= len(self.found.losses):
            return self.differs(f"loss of step {step + 1}: missing")
        wanted, found = self.reference.losses[step], self.found.losses[step]
        self._measure("loss", abs(found - wanted))
        return self._value(f"loss of step {step + 1}", wanted, found, tolerance)

    def evaluation(self, tolerance: Tolerance) -> None:
        """Compare the values of the last evaluation."""
        for name, wanted in self.reference.evaluation.items():
            what, found = f"{name} of the evaluation", self.found.evaluation.get(name)
            if found is None:
                self.differs(f"{what}: missing")
            else:
                why = "" if name == RESERVED else f" ({NO_MEAN})"
                self._value(what, wanted, found, tolerance, why=why)

    def _value(
        self, what: str, wanted: float, found: float, tolerance: Tolerance, *, why: str = ""
    ) -> None:
        if not abs(found - wanted) <= tolerance.loss * max(tolerance.terms, abs(wanted)):
            self.differs(f"{what}: {found:.9g}, reference {wanted:.9g}{why}")

    def gradients(self, step: int, tolerance: Tolerance) -> None:
        if step >= len(self.found.gradients):
            return self.differs(f"gradients of step {step + 1}: missing")
        wanted, found = self.reference.gradients[step], self.found.gradients[step]
        largest = max((max_abs(t) for t in wanted.values()), default=0.0)
        rounding = self._rounding("gradients", step)
        for name in sorted(found.keys() | wanted.keys()):
            if (name in wanted) != (name in found):
                has = "no gradient" if name in wanted else "a gradient, the reference none"
                self.differs(f"gradient of {name} in step {step + 1}: {has}")
                continue
            off = distance(wanted[name], found[name])
            self._measure("gradient", off)
            own, error = max_abs(wanted[name]), rounding.get(name, 0.0)
            limit = _limit(tolerance, largest=largest, own=own)
            explained = (2 if own > error else ZERO_ROUNDING) * error
            if tolerance.own_gradient is not None:  # rounding is measured with autocast
                explained += limit
            if not off <= max(limit, explained):
                self.differs(f"gradient of {name} in step {step + 1}: differs by {off:.3g}")
        return None

    def parameters(self, step: int, tolerance: Tolerance) -> None:
        """Compare parameters after `step` steps; 0 is the initial values."""
        if step >= len(self.found.parameters):
            return self.differs(f"parameters of step {step}: missing")
        start, wanted = self.reference.parameters[0], self.reference.parameters[step]
        moved = max((distance(start[n], wanted[n]) for n in wanted), default=0.0)
        limit = tolerance.parameter * max(moved, tolerance.parameter_floor)
        rounding = self._rounding("parameters", step)
        for name in sorted(wanted):
            value = self.found.parameters[step][name]
            off = distance(wanted[name], value)
            self._measure("parameter", off)
            own = max(limit, 2 * rounding.get(name, 0.0), self._rounds(name, step, tolerance))
            own = max(own, _last_place(wanted[name]))
            if step == 0:
                if not off <= INITIAL_LIMIT * max_abs(wanted[name]):
                    self.differs(f"initial value of {name}: differs by {off:.3g}")
            elif not off <= own and not self._flips(wanted[name], value, own, tolerance):
                self.differs(f"parameter {name} after step {step}: differs by {off:.3g}")
        return None

    def _rounds(self, name: str, step: int, tolerance: Tolerance) -> float:
        """What `Tolerance.update` explains of a parameter's difference after `step` steps."""
        steps = self.reference.parameters
        if not tolerance.update or not step or not is_in_a_layer(name, steps[step][name].shape):
            return 0.0
        return tolerance.update * distance(steps[step - 1][name], steps[step][name])

    def _flips(self, wanted: Tensor, found: Tensor, limit: float, tolerance: Tolerance) -> bool:
        """Whether so few elements differ, and by so little, that `Tolerance.flips` explains it."""
        if not tolerance.flips or wanted.shape != found.shape:
            return False
        off = (widened(wanted) - widened(found)).abs()
        num = int((off > limit).sum())
        return num <= tolerance.flips * off.numel() and off.max().item() <= self.step_size

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

    def _rounding(self, kind: str, step: int) -> dict[str, float]:
        steps = self.reference.rounding.get(kind)
        return steps[step] if steps else {}

    def _measure(self, kind: str, off: float) -> None:
        self.largest[kind] = off if math.isnan(off) else max(self.largest[kind], off)


def _limit(tolerance: Tolerance, *, largest: float, own: float) -> float:
    """Limit of a gradient's difference: less than the gradient, unless that is mere rounding."""
    of_all, share = tolerance.gradient * largest, tolerance.own_gradient
    if share is None:
        share = min(1000 * tolerance.gradient, 0.5)
    return min(of_all, max(share * own, of_all / 100))


def _last_place(tensor: Tensor) -> float:
    """Distance from a tensor's largest value to the next one that its dtype has."""
    has_places = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps * max_abs(tensor) if has_places else 0.0


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def to_json(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The document that `verify --json` prints; all cases of a model have the same tolerance."""
    cases, tolerance = [], None
    for result in results:
        case = asdict(result)
        tolerance = case.pop("tolerance")
        case["freeze"] = list(result.freeze)
        cases.append({**case, "passed": result.passed})
    return {
        "passed": all(result.passed for result in results),
        "reference": "single process",
        "tolerance": tolerance,
        "cases": cases,
    }
