"""Which texts a run writes between its steps. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSamplesPlan:
    prompts: tuple[str, ...]
    max_tokens: int
    """Tokens that each prompt is continued by, unless the separator of documents ends it."""
    every: int
    """Evaluations from one set of samples to the next."""
