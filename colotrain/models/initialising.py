"""Initial values of a sharded model, by its own `init_weights()`."""

from __future__ import annotations

import torch
from torch import nn

from colotrain.errors import ColotrainError
from colotrain.models.allocating import Allocates, KeepsEscaped
from colotrain.models.filling import ParameterFiller, Shards
from colotrain.models.seeding import seed_all


def initialise_(model: nn.Module, *, seed: int, shards: Shards, has_values: bool = False) -> None:
    """Give every parameter its initial value: a function of seed and model alone.

    As in plain torch a parameter has its module's default (`reset_parameters()`) until
    `model.init_weights()` changes it; a default that is overwritten unread is never computed.
    A parameter with neither is an error. Random values of a parameter come from its own generator,
    seeded by its name; other random numbers come from the global generators. With `has_values` the
    constructor has set the defaults. All ranks must call.
    """
    names = [name for name, _ in model.named_parameters()]
    filler = ParameterFiller(
        model, seed=seed, shards=shards, has_values=has_values, allocating=Allocates
    )
    with torch.no_grad(), filler.whole_parameters():
        seed_all(seed)
        with KeepsEscaped(filler), Allocates(filler):
            model.init_weights()  # type: ignore[operator]
        filler.finish()
    if added := [name for name, _ in model.named_parameters() if name not in names]:
        raise ColotrainError(
            f"model.target: init_weights() adds the parameter {added[0]}",
            "make every parameter in the constructor",
        )
