"""The whole model with its initial values, built in one process without the engine's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.dotted import import_target
from colotrain.generators import generator_of, seed_all, seeded
from colotrain.models import adapters, huggingface
from colotrain.models.huggingface_heads import train_new_layers_
from colotrain.models.loading import WHOLE
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import TorchDispatchMode, name_of, uncompiled_
from colotrain.verify import quantized
from colotrain.verify.adapters import compute_plainly_

DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "random_")
"""Methods that replace a tensor's values by random ones."""


def build_plain(plan: ModelPlan, *, seed: int) -> nn.Module:
    """Build the whole model, with its initial values, in this process."""
    with seeded(seed):
        if plan.hf is not None:
            values = quantized.stored_values(Path(plan.hf))
            model = huggingface.build(plan, loads=True, values=values)
        elif plan.is_deferred:
            model = _initialised(plan, seed)
        else:
            model = _made(plan)
    if plan.quantize is not None:
        quantized.round_(model, plan.quantize)
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
        if plan.head is not None:
            train_new_layers_(model)
        adapters.fill_(model, plan.adapter, seed=seed, shards=WHOLE)
        compute_plainly_(model, plan.adapter)
    return model


def _made(plan: ModelPlan) -> nn.Module:
    """The target's model, whose parameters keep their names where the user's code compiled it."""
    model, _ = uncompiled_(import_target("model.target", plan.target)(**plan.args))
    return model


def _initialised(plan: ModelPlan, seed: int) -> nn.Module:
    """Call the model's `init_weights()`; each parameter draws from a generator of its own name."""
    with _DrawsForParameters(None):
        model: Any = _made(plan)
    own = {
        parameter: generator_of(name, seed=seed)
        for name, parameter in module_tree.named_parameters(model)
    }
    seed_all(seed)
    with torch.no_grad(), _DrawsForParameters(own):
        model.init_weights()
    return model


class _DrawsForParameters(TorchDispatchMode):
    """Draws values of parameters from generators of their own, or leaves them out."""

    def __init__(self, generators: dict[nn.Parameter, torch.Generator] | None) -> None:
        super().__init__()
        self.generators = generators
        """Generator of each parameter; None: nothing is drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in DRAWS and kwargs.get("generator") is None:
            if self.generators is None and isinstance(args[0], nn.Parameter):
                return args[0]
            if (own := self._generator_of(args[0])) is not None:
                kwargs = {**kwargs, "generator": own}
        return func(*args, **kwargs)

    def _generator_of(self, tensor: Tensor) -> torch.Generator | None:
        """The generator of the parameter whose memory this is now: `data` may be assigned."""
        address = tensor.untyped_storage().data_ptr()
        for parameter, generator in (self.generators or {}).items():
            if parameter.untyped_storage().data_ptr() == address:
                return generator
        return None
