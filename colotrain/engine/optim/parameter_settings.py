"""Learning rate scale, weight decay and kind of update of each parameter.

Norms and biases have no weight decay, whatever their shape: a parameter is one by the class of its
module, or by its name. A norm per head has two dimensions, and so has a bias per expert.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import nn

from colotrain import module_tree
from colotrain.spec.optimizers import is_in_a_layer, optimizer_of
from colotrain.spec.plan import OptimPlan, matches

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MATRICES = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag),
    *CONVOLUTIONS,
    *TRANSPOSED_CONVOLUTIONS,
)
"""Modules whose weight is never a norm's, whatever they are called."""
_NORM_CLASS = re.compile(r"Norm(?!al)")
_NORM_NAME = re.compile(r"(^|_)(\w*norm|ln)(_?[0-9a-z])?$")
_BIAS_NAME = re.compile(r"(^|_)bias(_|$)|^b_(ih|hh)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSettings:
    """Settings of a parameter group; parameters with equal ones share a group."""

    lr_scale: float
    """Learning rate, as a multiple of `optim.lr`."""
    weight_decay: float
    is_hidden: bool
    """Whether it is a matrix of a numbered layer, for optimizers that update these in another way
    than embeddings, the output head, vectors and all others."""


def norms_and_biases(model: nn.Module) -> frozenset[str]:
    """Every name of each parameter that belongs to a norm, or is a bias."""
    found = set()
    for prefix, module in module_tree.named_modules(model):
        for own in module._parameters:
            if _is_bias(prefix, own) or _is_norm(prefix, own, module):
                found.add(f"{prefix}.{own}" if prefix else own)
    return frozenset(found)


def _is_bias(prefix: str, own: str) -> bool:
    owner = prefix.rpartition(".")[2]
    return bool(_BIAS_NAME.search(own) or (own == "weight" and owner.endswith("bias")))


def _is_norm(prefix: str, own: str, module: nn.Module) -> bool:
    if isinstance(module, MATRICES):
        return False
    if any(_NORM_CLASS.search(base.__name__) for base in type(module).__mro__):
        return True
    owner = prefix.rpartition(".")[2]
    names = (own, owner) if own in ("weight", "scale", "gamma", "beta") else (own,)
    return any(_NORM_NAME.search(name) for name in names)


def settings_of(
    name: str,
    ndim: int,
    plan: OptimPlan,
    *,
    undecayed: Set[str] = frozenset(),
    aliases: Sequence[str] = (),
) -> ParameterSettings:
    """Return the settings of a parameter; `undecayed` are the names of norms and biases.

    Other matrices decay and vectors do not, unless a rule says otherwise. A rule matches by any
    name of a tied parameter. If several rules match, each overrides the settings it names.
    """
    is_matrix = ndim >= 2 and name not in undecayed
    lr_scale, weight_decay = 1.0, plan.weight_decay if is_matrix else 0.0
    for rule in plan.rules:
        if matches((name, *aliases), [rule.match]):
            lr_scale = lr_scale if rule.lr_scale is None else rule.lr_scale
            weight_decay = weight_decay if rule.weight_decay is None else rule.weight_decay
    tells_hidden = optimizer_of(plan.name).tells_hidden
    is_hidden = tells_hidden and is_matrix and is_in_a_layer(name, (0,) * ndim)
    return ParameterSettings(lr_scale=lr_scale, weight_decay=weight_decay, is_hidden=is_hidden)
