"""Functions inside transformers that are replaced where they cannot do what colotrain needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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


def attention_of(model: Any) -> str | None:
    """Return the name of the attention function that a model uses."""
    name: str | None = model.config._attn_implementation
    return name


def tp_plan_of(model: Any) -> dict[str, str]:
    """Return transformers' plan for dividing the layers of a model: glob → style."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return plan
