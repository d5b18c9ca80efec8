"""Initial values of a sharded model, by its own `init_weights()`."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from colotrain import module_tree
from colotrain.errors import ColotrainError
from colotrain.models.allocating import Allocates, KeepsEscaped
from colotrain.models.filling import ParameterFiller, Shards
from colotrain.models.seeding import seed_all


def initialise_(model: nn.Module, *, seed: int, shards: Shards, later: Container[str] = ()) -> None:
    """Call `model.init_weights()`, which gives every parameter its value. All ranks must call.

    Random values of a parameter come from its own generator, seeded by its name; other random
    numbers come from the global generators. A parameter that is left without a value is an error,
    except for those in `later`.
    """
    names = [name for name, _ in module_tree.named_parameters(model)]
    filler = ParameterFiller(model, seed=seed, shards=shards)
    with torch.no_grad(), filler.whole_parameters():
        seed_all(seed)
        with KeepsEscaped(filler), Allocates(filler):
            model.init_weights()  # type: ignore[operator]
        filler.finish(later=later)
    if added := [name for name, _ in module_tree.named_parameters(model) if name not in names]:
        raise ColotrainError(
            f"model.deferred_init=true: init_weights() adds the parameter {added[0]}",
            "make every parameter in the constructor",
        )
