"""Freezing: globs on parameter names, applied before sharding and before the optimizer exists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from colotrain import module_tree
from colotrain.spec.plan import FreezePlan, matches

BY_MODEL = "requires_grad"
"""Reason for a parameter that the model's own code froze."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The parameters that do not train, and why."""

    reasons: dict[str, str]
    """Parameter name → the pattern that froze it, or BY_MODEL."""
    matched: dict[str, int]
    """Pattern (from patterns, except and unfreeze) → number of parameters that match it."""


def freeze_(model: nn.Module, plan: FreezePlan, *, step: int = 0) -> Frozen:
    """Set `requires_grad` of every parameter as the plan says for `step` (0 is the first).

    A tied parameter matches by any of its names. Parameters that the model's own code froze stay
    frozen unless `except` or the schedule names them. Works on sharded models too, as long as their
    parameters are in the sharded state.
    """
    names = names_of(model)
    reasons: dict[str, str] = {}
    for parameter, known_as in names.items():
        reason = _reason(known_as, parameter, plan, step)
        parameter.requires_grad = reason is None  # a lazy parameter has no requires_grad_()
        if reason is not None:
            reasons[known_as[0]] = reason
    return Frozen(reasons=reasons, matched=_count_matches(names.values(), plan))


def _reason(
    known_as: list[str], parameter: nn.Parameter, plan: FreezePlan, step: int
) -> str | None:
    unfrozen = [globs for at, globs in plan.unfreeze.items() if at <= step]
    if any(matches(known_as, globs) for globs in (plan.except_, *unfrozen)):
        return None
    pattern = next((glob for glob in plan.patterns if matches(known_as, [glob])), None)
    if pattern is not None:
        return pattern
    return None if parameter.requires_grad else BY_MODEL


def unfrozen_later(model: nn.Module, plan: FreezePlan) -> set[str]:
    """Return the parameters that the schedule unfreezes at any step, past steps included."""
    known = names_of(model).values()
    return {known_as[0] for known_as in known if plan.unfreezes(known_as)}


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter's names: several where it is tied, the first one its own."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module_tree.named_parameters(model, remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _count_matches(known: Iterable[list[str]], plan: FreezePlan) -> dict[str, int]:
    known = list(known)
    globs = (*plan.patterns, *plan.except_, *plan.scheduled)
    return {glob: sum(matches(names, [glob]) for names in known) for glob in globs}
