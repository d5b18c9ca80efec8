"""The optimizers of a process: which one steps within another, and which parameters each has."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.records import Membership
from colotrain.audit.sites import Site, here, variables
from colotrain.audit.window import number

ENGINES = ("ZeRO-3", "DeepSpeedEngine")
"""Frameworks whose optimizers hold copies of the parameters."""


class Optimizers:
    """Optimizers in the order of their first steps, and all that were made."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Number of steps of each optimizer."""
        self._stepped: list[weakref.ref[Any]] = []
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers in whose place others came."""
        self._held: list[tuple[type, list[weakref.ref[Tensor]]]] = []
        """Class and parameters of each."""
        self._since: list[int] = []
        """Steps that were made before by optimizers in whose place each is."""
        self._after_one: list[bool] = []
        """Whether each is in the place of one that made a single step."""
        self._made: weakref.WeakKeyDictionary[Any, Site] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}
        self._inside: list[Any] = []
        """Optimizers whose steps are under way, the outermost first."""

    def made(self, optimizer: Any) -> None:
        """Note where an optimizer is made, and the script's names of what it gets."""
        self._made[optimizer] = here()
        names = dict[int, str]()
        for name, value in variables().items():
            if isinstance(value, Tensor):
                names[id(value)] = name
            elif isinstance(value, nn.Module):
                for own, held in value.named_parameters():
                    names.setdefault(id(held), f"{name}.{own}")
        for key, parameter in positions(optimizer):
            self._names[id(parameter)] = names.get(id(parameter), key)

    def enter(self, optimizer: Any) -> bool:
        """Note that a step begins, and return whether it is within no other optimizer's."""
        if any(other is optimizer for other in self._inside):  # its last step failed
            self._inside.clear()
        self._inside.append(optimizer)
        return len(self._inside) == 1

    def leave(self, optimizer: Any) -> bool:
        """Note that a step ends, and return whether it was within no other optimizer's."""
        while self._inside and self._inside.pop() is not optimizer:
            pass
        return not self._inside

    def number_of(self, optimizer: Any) -> int:
        """Return the optimizer's position in the order of first steps, appended if it is new.

        One of the same class and parameters has the place of the last one.
        """
        for index, known in enumerate(self._stepped):
            if known() is optimizer:
                return index
        if self._stepped and optimizer not in self._replaced and self._is_like_last(optimizer):
            self._after_one[-1] = self.steps[-1] == self._since[-1] + 1
            if (last := self._stepped[-1]()) is not None:
                self._replaced.add(last)
            self._stepped[-1], self._since[-1] = weakref.ref(optimizer), self.steps[-1]
        else:
            self._stepped.append(weakref.ref(optimizer))
            held = [weakref.ref(parameter) for _, parameter in positions(optimizer)]
            self._held.append((type(optimizer), held))
            self.steps.append(0)
            self._since.append(0)
            self._after_one.append(False)
        return len(self._stepped) - 1

    def _is_like_last(self, optimizer: Any) -> bool:
        kind, refs = self._held[-1]
        last, own = [ref() for ref in refs], [parameter for _, parameter in positions(optimizer)]
        return (
            kind is type(optimizer)
            and bool(own)
            and len(last) == len(own)
            and all(map(operator.is_, last, own))
        )

    def is_rebuilt(self, index: int, optimizer: Any) -> bool:
        """Whether a step was the first of an optimizer with moments, after another's only one."""
        is_first = self.steps[index] == self._since[index] + 1
        return is_first and self._after_one[index] and any(getattr(optimizer, "state", {}).values())

    def all(self) -> list[Any]:
        """Return the optimizers that were made or made a step, and are alive."""
        stepped = [optimizer for ref in self._stepped if (optimizer := ref()) is not None]
        made = [optimizer for optimizer in self._made if not any(optimizer is o for o in stepped)]
        return stepped + made

    def held(self, *, stepped: bool = False) -> dict[int, Tensor]:
        """Return the parameters of all optimizers, or of those that made a step, by their ids."""
        known = [ref() for ref in self._stepped] if stepped else self.all()
        return {id(p): p for optimizer in known for _, p in positions(optimizer)}

    def outside(self, roots: model.Roots) -> dict[str, Tensor]:
        """Return leaves that optimizers hold and no module that ran has, by the script's names."""
        if model.framework(roots.all()) in ENGINES:
            return {}
        inside, found = {id(p) for r in roots.all() for p in r.parameters()}, dict[str, Tensor]()
        for key, p in self.held().items():
            if key not in inside and p.requires_grad and p.is_leaf:
                name = self._names.get(key, f"an added tensor of shape {list(p.shape)}")
                found[model.unused(name, found)] = p
        return found

    def membership(
        self, step: int, roots: model.Roots, *, loose: list[str], complete: bool
    ) -> Membership:
        """Return which parameters the model and the optimizers have at a step."""
        parameters, held = roots.parameters(), self.held() if complete else {}
        apart = roots.apart() if complete else set()
        ids = {id(p) for p in parameters.values()}
        foreign = [p for key, p in held.items() if key not in ids]
        stepped = [o for ref in self._stepped if (o := ref()) is not None] if complete else []
        twice = {key for o in stepped for key, num in counted(o).items() if num > 1}
        owners = Counter(key for optimizer in stepped for key in counted(optimizer))
        sites = (self._made.get(optimizer) for optimizer in self.all())
        return Membership(
            step=step,
            trainable=[n for n, p in parameters.items() if p.requires_grad and n not in apart],
            frozen=[n for n, p in parameters.items() if not p.requires_grad],
            missing=[
                n
                for n, p in parameters.items()
                if complete and p.requires_grad and id(p) not in held and n not in apart
            ],
            apart=[n for n in apart if parameters[n].grad is not None],
            twice=[n for n, p in parameters.items() if id(p) in twice],
            loose=loose,
            shared=[n for n, p in parameters.items() if owners[id(p)] > 1],
            foreign=len(foreign),
            copies=sum(p.grad is not None for p in foreign),
            made_at=next((site for site in sites if site is not None), Site("")).plain(),
            complete=complete,
            untied=model.untied(roots),
        )


def positions(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield an optimizer's parameters, each with the expression that leads to it."""
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for place, parameter in enumerate(group["params"]):
            yield f"param_groups[{index}]['params'][{place}]", parameter


def counted(optimizer: Any) -> Counter[int]:
    """Return how often an optimizer has each parameter, by id."""
    return Counter(id(parameter) for _, parameter in positions(optimizer))


def learning_rate(optimizer: Any) -> float | None:
    """Return the first group's learning rate that is not zero."""
    rates = [number(group.get("lr")) for group in optimizer.param_groups]
    return next((rate for rate in rates if rate), rates[0])


def at_rest(optimizer: Any) -> set[int]:
    """Return the ids of the parameters whose learning rate is zero."""
    return {
        id(p) for group in optimizer.param_groups if not group.get("lr") for p in group["params"]
    }


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether one step adds -lr times the gradient, with one lr and nothing else."""
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.SGD) and all(
        not group.get("momentum")
        and not group.get("weight_decay")
        and not group.get("maximize")
        and group.get("lr") == groups[0].get("lr")
        for group in groups
    )
