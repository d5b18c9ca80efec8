"""Settings that other tools use where their files say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from colotrain.migrate.deepspeed import plain_name
from colotrain.migrate.findings import DECAY_OF_ALL, Flat, is_on

Defaults = Callable[[Flat], dict[str, Any]]
"""Keys of a file, with their values → settings of colotrain."""
ALWAYS: dict[str, Any] = {
    "train.grad_clip": None,
    "optim.schedule.name": "constant",
    "optim.schedule.warmup_steps": 0,
}
"""Defaults of all tools: they neither clip nor change the learning rate."""
Argument = tuple[str, str, Any]
"""Arguments as triples (the tool's name, colotrain's key, the tool's default)."""
ADAM: tuple[Argument, ...] = (
    ("lr", "optim.lr", 1e-3),
    ("betas", "optim.betas", [0.9, 0.999]),
    ("eps", "optim.eps", 1e-8),
    ("weight_decay", "optim.weight_decay", 0.0),
)
SGD: tuple[Argument, ...] = (
    ("lr", "optim.lr", 1e-3),
    ("momentum", "optim.momentum", 0.0),
    ("weight_decay", "optim.weight_decay", 0.0),
)
OPTIMIZERS = {"adam": ADAM, "adamw": ADAM, "sgd": SGD}
"""Optimizer → its arguments, with the defaults that torch and DeepSpeed agree on."""
LION = tuple(argument for argument in ADAM if argument[0] != "eps")
"""Lion's arguments in DeepSpeed; torch has no Lion."""
TORCH_ADAMW_DECAY = 0.01
"""Default weight decay of torch's AdamW; DeepSpeed's optimizer of that name has no decay."""


def silent(where: str = "", arguments: str = "", *, is_torch: bool = False) -> Defaults:
    """Return the defaults of a tool that takes the optimizer's name and arguments at these keys.

    Keys with the value `auto` are left out: their values come from elsewhere. An empty `where` is
    for tools whose files have no optimizer.
    """

    def defaults(given: Flat) -> dict[str, Any]:
        is_torchs = is_torch or is_on(given.get(f"{arguments}.torch_adam"))
        return {**ALWAYS, **dict(_optimizer(given, where, arguments, is_torch=is_torchs))}

    return defaults


def _optimizer(
    given: Flat, where: str, arguments: str, *, is_torch: bool
) -> Iterator[tuple[str, Any]]:
    name = plain_name(str(given.get(where, "")))
    known = OPTIMIZERS if is_torch else OPTIMIZERS | {"lion": LION}
    for argument, key, value in known.get(name, ()):
        if given.get(f"{arguments}.{argument}") is None:
            decays = argument == "weight_decay" and name == "adamw" and is_torch
            yield key, TORCH_ADAMW_DECAY if decays else value
            if decays:
                yield from DECAY_OF_ALL.items()
