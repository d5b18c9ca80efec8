"""Freezing: globs on parameter names, applied before sharding and before the optimizer exists.

What a schedule unfreezes later is unfrozen by the same function (`step.rollback.freeze_as_of`);
adapters freeze what they adapt by themselves, and `PartMap` keeps the reasons.
"""

from __future__ import annotations

from torch import nn

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import FreezePlan, matches

BY_MODEL = "requires_grad"
"""Reason for a parameter that the model's own code froze."""


def freeze_(model: nn.Module, freeze: FreezePlan, *, step: int = 0) -> dict[str, str]:
    """Set `requires_grad` of every parameter as the plan says for `step` (0 is the first).

    Return the name of each frozen parameter → the pattern that froze it, or `BY_MODEL`.

    A tied parameter matches by any of its names. Parameters that the model's own code froze stay
    frozen unless `except` or the schedule names them. Works on sharded models too, as long as their
    parameters are in the sharded state.
    """
    reasons: dict[str, str] = {}
    for parameter, known_as in names_of(model).items():
        reason = _reason(known_as, parameter, freeze, step)
        if reason is None and not (parameter.is_floating_point() or parameter.is_complex()):
            raise _cannot_train(known_as[0], parameter)
        parameter.requires_grad = reason is None  # a lazy parameter has no requires_grad_()
        if reason is not None:
            reasons[known_as[0]] = reason
    return reasons


def _cannot_train(name: str, parameter: nn.Parameter) -> ConfigError:
    """Return the problem of a pattern that lets whole numbers train, as those of packed blocks."""
    problem = Problem(
        key="freeze.except",
        value=name,
        expected=f"parameters that can train (this one is {parameter.dtype}: packed, or a code)",
        fix="leave it out of freeze.except and freeze.unfreeze, or set model.quantize=null",
    )
    return ConfigError([problem])


def _reason(
    known_as: list[str], parameter: nn.Parameter, freeze: FreezePlan, step: int
) -> str | None:
    unfrozen = [globs for at, globs in freeze.unfreeze.items() if at <= step]
    if any(matches(known_as, globs) for globs in (freeze.except_, *unfrozen)):
        return None
    pattern = next((glob for glob in freeze.patterns if matches(known_as, [glob])), None)
    if pattern is not None:
        return pattern
    return None if parameter.requires_grad else BY_MODEL


def unfrozen_later(model: nn.Module, freeze: FreezePlan) -> set[str]:
    """Return the parameters that the schedule unfreezes at any step, past steps included."""
    known = names_of(model).values()
    return {known_as[0] for known_as in known if freeze.unfreezes(known_as)}


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter's names: several where it is tied, the first one its own."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module_tree.named_parameters(model, remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def count_matches(model: nn.Module, freeze: FreezePlan) -> dict[str, int]:
    """Return pattern (of patterns, except and unfreeze) → number of parameters that it matches."""
    known = names_of(model).values()
    globs = (*freeze.patterns, *freeze.except_, *freeze.scheduled)
    return {glob: sum(matches(names, [glob]) for names in known) for glob in globs}
