"""Private names of transformers, and functions that are replaced where they do not suffice."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.generators import seeded


@contextmanager
def without_packed_sequence_search() -> Iterator[None]:
    """Skip transformers' search for packed sequences, which needs values, on the meta device."""
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    found = getattr(masks, name, None)
    if masks is None or found is None:
        yield
        return
    setattr(masks, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masks, name, found)


def let_experts_compute_anywhere_() -> None:
    """Multiply experts one by one in float64 and on the meta device.

    transformers takes torch's grouped product there as well, which exists for neither.
    """
    experts: Any = sys.modules.get("transformers.integrations.moe")
    can_group = getattr(experts, "_can_use_grouped_mm", None)
    if can_group is None or hasattr(can_group, "original"):
        return

    def can_use_grouped_mm(input: Tensor, *args: Any, **kwargs: Any) -> bool:
        if input.is_meta or input.dtype == torch.float64:
            return False
        return bool(can_group(input, *args, **kwargs))

    can_use_grouped_mm.original = can_group  # type: ignore[attr-defined]
    experts._can_use_grouped_mm = can_use_grouped_mm


def construct_in_float64(architecture: Any, config: Any) -> Any:
    """Return a new model with random weights, whose experts are multiplied one by one."""
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"  # the fast ones have no float64
    return architecture._from_config(config, dtype=torch.float64)


def attention_of(model: Any) -> str | None:
    """Return the name of the attention function that a model uses."""
    name: str | None = model.config._attn_implementation
    return name


def tp_plan_of(model: Any) -> dict[str, str]:
    """Return transformers' plan for dividing the layers of a model: glob → style."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return plan


def patterns_to_ignore(model: Any, which: str) -> tuple[str, ...]:
    """Return regular expressions of names that may be "missing" in files, or "unexpected"."""
    return tuple(getattr(model, f"_keys_to_ignore_on_load_{which}") or ())


def patterns_in_float32(model: Any, dtype: torch.dtype) -> list[str]:
    """Return regular expressions of tensors that are float32 in a model of `dtype`."""
    return [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]


def draw_(model: Any, names: Sequence[str], *, seed: int) -> list[Tensor]:
    """Initial values of the parameters `names` of a new model on the meta device.

    They are those that from_pretrained draws after `torch.manual_seed(seed)` for parameters that a
    directory lacks: of tied ones, those of the parameter that the others are tied to.
    """
    ties = dict(model.all_tied_weights_keys)
    for target in ties:
        _replace_(model, target, torch.empty_like(model.get_parameter(target)))
    initialized: Any
    for initialized in (*module_tree.parameters(model), *module_tree.buffers(model)):
        initialized._is_hf_initialized = True
    drawn = [ties.get(name, name) for name in names]
    for name in drawn:
        _replace_(model, name, torch.empty_like(model.get_parameter(name), device="cpu"))
    for initialized in module_tree.modules(model):
        initialized._is_hf_initialized = False
    with seeded(seed):
        model.initialize_weights()
    return [model.get_parameter(name).detach() for name in drawn]


def _replace_(model: Any, name: str, tensor: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    requires_grad = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(owner), key, nn.Parameter(tensor, requires_grad))
