"""The reference's model, made as a program of the user's own would make it.

A user's target is imported and called under the run's seed, and a model directory is loaded by
transformers. Nothing here is shared with the code that gives sharded models their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colotrain import module_tree
from colotrain.dotted import import_target
from colotrain.models import adapters, huggingface
from colotrain.models.loading import WHOLE
from colotrain.models.seeding import generator_of, seed_all, seeded
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import TorchDispatchMode, name_of, uncompiled_

DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "random_")
"""Methods that replace a tensor's values by random ones."""


def build_plain(plan: ModelPlan, *, seed: int) -> nn.Module:
    """Build the whole model, with its initial values, in this process."""
    with seeded(seed):
        if plan.hf is not None:
            model = huggingface.build(plan, loads=True)
        elif plan.is_deferred:
            model = _initialised(plan, seed)
        else:
            model = _made(plan)
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
        adapters.fill_(model, plan.adapter, seed=seed, shards=WHOLE)
    return model


def _made(plan: ModelPlan) -> nn.Module:
    """The target's model, whose parameters keep their names where the user's code compiled it."""
    model, _ = uncompiled_(import_target("model.target", plan.target)(**plan.args))
    return model


def _initialised(plan: ModelPlan, seed: int) -> nn.Module:
    """Call the model's `init_weights()`; each parameter draws from a generator of its own name."""
    with _DrawsForParameters(None):
        model: Any = _made(plan)
    named = {
        parameter.untyped_storage().data_ptr(): generator_of(name, seed=seed)
        for name, parameter in module_tree.named_parameters(model)
    }
    seed_all(seed)
    with torch.no_grad(), _DrawsForParameters(named):
        model.init_weights()
    return model


class _DrawsForParameters(TorchDispatchMode):
    """Draws values of parameters from generators of their own, or leaves them out."""

    def __init__(self, generators: dict[int, torch.Generator] | None) -> None:
        super().__init__()
        self.generators = generators
        """Address of a parameter's memory → its generator; None: nothing is drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in DRAWS and kwargs.get("generator") is None:
            if self.generators is None and isinstance(args[0], nn.Parameter):
                return args[0]
            own = (self.generators or {}).get(args[0].untyped_storage().data_ptr())
            kwargs = {**kwargs, "generator": own} if own is not None else kwargs
        return func(*args, **kwargs)
