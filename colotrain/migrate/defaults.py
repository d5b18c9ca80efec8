"""Defaults of other tools, for settings that their configuration does not contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colotrain.migrate.deepspeed import plain_name
from colotrain.migrate.findings import DECAY_OF_ALL, is_on

ALWAYS: dict[str, Any] = {
    "train.grad_clip": None,
    "optim.schedule.name": "constant",
    "optim.schedule.warmup_steps": 0,
}
"""Defaults of all tools: they neither clip nor change the learning rate."""
Argument = tuple[str, str, Any]
"""Arguments as triples (the tool's name, colotrain's key, the tool's default)."""
PLACES = {
    "deepspeed": ("optimizer.type", "optimizer.params"),
    "lightning": ("optimizer.class_path", "optimizer.init_args"),
}
"""Keys of the optimizer's name and of its arguments; Accelerate's files have neither."""
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
TORCH_ADAMW_DECAY = 0.01
"""Default weight decay of torch's AdamW; DeepSpeed's optimizer of that name has no decay."""


def defaults(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the tool `kind` uses by default where a file has only the keys `given`.

    Keys with the value `auto` are left out: their values come from elsewhere.
    """
    return {**ALWAYS, **dict(_optimizer(kind, given))}


def _optimizer(kind: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    where, arguments = PLACES.get(kind, ("", ""))
    name = plain_name(str(given.get(where, "")))
    is_torch = kind == "lightning" or is_on(given.get(f"{arguments}.torch_adam"))
    for argument, key, value in OPTIMIZERS.get(name, ()):
        if given.get(f"{arguments}.{argument}") is None:
            decays = argument == "weight_decay" and name == "adamw" and is_torch
            yield key, TORCH_ADAMW_DECAY if decays else value
            if decays:
                yield from DECAY_OF_ALL.items()
