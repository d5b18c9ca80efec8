"""Settings of objectives that make their own targets, all resolved. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPlan:
    """Masked language modelling: which tokens are hidden, and what stands in their place."""

    probability: float
    """Share of the tokens, special ones left out, that are targets."""
    mask_id: int
    pad_id: int
    begin_id: int | None
    """Token before the text of every sample, such as [CLS]; None: none."""
    end_id: int | None
    """Token after the text of every sample, such as [SEP]; None: none."""
    special_ids: tuple[int, ...]
    """Tokens that are never targets."""
    vocab_size: int
    """Random tokens are below this."""
