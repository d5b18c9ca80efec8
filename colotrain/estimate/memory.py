"""What a plan needs, in bytes per rank. Standard library only; `plan`'s shapes go in and out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from colotrain.plan import Ledger, OptimPlan, ParameterInfo, Survey
from colotrain.plugins import Row

STATE_BYTES = 4
"""Optimizer state is kept in fp32."""
_BLOCK = re.compile(r"^(.*?\.)?\d+\.")


def model_state_bytes(row: Row, survey: Survey, shard: int, optim: OptimPlan) -> Ledger:
    """Parameters, gradients, optimizer state and gathered parameters on the largest rank.

    `shard` is how many ranks share one copy of the model. Frozen parameters have no gradient and
    no optimizer state. Activations and buffers are not in it.
    """
    parameters = survey.parameters
    trainable = [p for p in parameters if p.frozen_by is None]
    gradients_over = 1 if row.gradients == "whole" else shard
    return Ledger(
        parameters=sum(shard_numel(p, shard) * p.itemsize for p in parameters),
        gradients=sum(shard_numel(p, gradients_over) * p.itemsize for p in trainable),
        optimizer=sum(shard_numel(p, shard) for p in trainable) * _state_bytes(optim),
        gathered=_gathered_bytes(row, parameters),
    )


def shard_numel(parameter: ParameterInfo, shard: int) -> int:
    """Elements of the first shard; `fully_shard` cuts dimension 0 and rounds up."""
    if not parameter.shape:
        return parameter.numel
    rows = parameter.shape[0]
    return math.ceil(rows / shard) * (parameter.numel // max(1, rows))


def _state_bytes(optim: OptimPlan) -> int:
    """Per trainable element: Adam keeps two moments, SGD one if it has momentum."""
    if optim.name == "adamw":
        return 2 * STATE_BYTES
    return STATE_BYTES if optim.betas and optim.betas[0] else 0


def _gathered_bytes(row: Row, parameters: Iterable[ParameterInfo]) -> int:
    """Whole parameters that live beside the shards.

    Kept through the step: all of them. Freed after use: approximately what no block holds, and
    the two largest blocks (the one in use and the one being fetched), told apart by their names.
    """
    groups: dict[str, int] = {}
    for parameter in parameters:
        found = _BLOCK.match(parameter.name)
        name = found[0] if found else ""
        groups[name] = groups.get(name, 0) + parameter.numel * parameter.itemsize
    if row.parameters_live == "step":
        return sum(groups.values())
    outside = groups.pop("", 0)
    return outside + sum(sorted(groups.values())[-2:])
