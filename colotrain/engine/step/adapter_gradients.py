"""Whether every adapter gets a gradient in the first step of a run.

An adapter that nothing calls, or whose output leads to no loss, stays as it began, and nothing else
would tell. Experts without a token in this step are no such adapters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from colotrain import module_tree
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.participant import Agreed, Participant
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.models import adapters
from colotrain.models.huggingface_images import modules_of_images

MOST_SHOWN = 3
FIX = (
    "leave {layers} out (adapter.exclude), or let the model call it, and let its output lead to "
    "the loss"
)


class AdapterGradients(Participant):
    """Refuses the first step with targets in which an adapter has no gradient on any rank."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        model = run.sharded.module
        self.owners = {} if run.plan.model.adapter is None else owners_of(model)
        self.called: set[str] = set()
        """Those whose forward was called on this rank."""
        self.hooks: list[Any] = []
        self.begins: bool | None = None
        """Whether the first step of this attempt is the run's; None: there was no step yet."""
        if run.plan.train.compile:  # hooks would be compiled, too
            return
        for owner in self.owners:
            note = partial(_note, self.called, owner)
            self.hooks.append(model.get_submodule(owner).register_forward_pre_hook(note))

    def before_update(self, agreed: Agreed) -> None:
        self.begins = self.run.step == 0 if self.begins is None else self.begins
        if not self.begins:  # an attempt that goes on: its samples may need other modules
            self._end()
        if not self.owners or not agreed.finite or not agreed.tokens:
            return
        self._check()
        self._end()

    def _end(self) -> None:
        self.owners = {}
        for hook in self.hooks:
            hook.remove()

    def _check(self) -> None:
        state, parts = self.run.gradients, self.run.sharded.parts
        trained = {n for owner in self.owners.values() for n in owner if parts[n].frozen is None}
        here = {n for n in trained if parts[n].is_here}
        model = self.run.sharded.module
        found = without_gradient(
            self.owners, self.called, trained=here, used=state.used, model=model
        )
        if not found:
            return
        names = ", ".join(found[:MOST_SHOWN]) + ", …" * (len(found) > MOST_SHOWN)
        is_one, is_called = len(found) == 1, bool(self.called.intersection(found))
        what = f"adapter of {names} has" if is_one else f"adapters of {names} have"
        problem = f"step {self.run.step + 1}: the {what} no gradient"
        if not is_called and self._may_see_images(found):
            text = f"warning: {problem}: no sample of this step has an image"
            if self.run.rank == 0:
                self.run.events.write(Note(step=self.run.step + 1, text=text))
            return
        how = "leads to no loss" if is_called else "is called by nothing"
        if self.run.plan.train.compile:
            how = "has no path to the loss"
        raise ColotrainError(
            f"{problem}: {'it' if is_one else 'each'} {how}", FIX.format(layers=names)
        )

    def _may_see_images(self, owners: list[str]) -> bool:
        """Whether other samples of an own dataset may have the images that these modules read."""
        plan = self.run.plan
        if plan.model.hf is None or plan.data.source != "target":
            return False
        begins = tuple(f"{name}." for name in modules_of_images(self.run.sharded.module))
        return all(owner.startswith(begins) for owner in owners)


def _note(called: set[str], owner: str, *_: Any) -> None:
    called.add(owner)


def owners_of(model: nn.Module) -> dict[str, list[str]]:
    """Module → the parameters of its adapters that have a gradient from the first step on.

    A has none while B is zero.
    """
    names = {id(module): name for name, module in module_tree.named_modules(model)}
    found: dict[str, list[str]] = {}
    for part in adapters.parts(model):
        if part.role != adapters.A:
            owner = names[id(part.owner)]
            in_parameter = isinstance(part.owner, adapters.ParameterAdapter)
            owner = owner.rpartition(".")[0] if in_parameter else owner
            found.setdefault(owner, []).append(part.name)
    return found


def without_gradient(
    owners: dict[str, list[str]],
    called: set[str],
    *,
    trained: set[str],
    used: set[str],
    model: nn.Module,
) -> list[str]:
    """Modules whose adapters no backward reached, though they were called or nothing is like them.

    A module that was not called is left out where the same one of another child of its list was
    used: experts without a token, or layers that are dropped at random.
    """
    unused = {o: [n for n in ns if n in trained and n not in used] for o, ns in owners.items()}
    lists = {
        name
        for name, module in module_tree.named_modules(model)
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    return [
        owner
        for owner, names in unused.items()
        if names and (owner in called or not _has_used_sibling(owner, owners, used, lists))
    ]


def _has_used_sibling(
    owner: str, owners: dict[str, list[str]], used: set[str], lists: set[str]
) -> bool:
    path = owner.split(".")
    for index in range(1, len(path)):
        above, rest = ".".join(path[:index]), path[index + 1 :]
        if above not in lists:
            continue
        for other, names in owners.items():
            steps = other.split(".")
            alike = steps[:index] == path[:index] and steps[index + 1 :] == rest
            if alike and other != owner and used.intersection(names):
                return True
    return False
