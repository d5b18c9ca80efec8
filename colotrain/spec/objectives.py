"""Settings of the built-in objectives, all resolved. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

IGNORE_INDEX = -100
"""Label that losses leave out, as torch's do."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Direct preference optimization."""

    beta: float = 0.1
    """How much the model is held to its reference; lower values allow more change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """Knowledge distillation."""

    teacher: str | None = None
    """A Hugging Face directory of a causal model with the vocabulary of the one that trains."""
    top_k: int = 64
    """Most probable tokens of each target whose probabilities are kept; the others have one
    together."""
    alpha: float = 0.5
    """Weight of the teacher in the loss; that of the labels is the rest to 1."""
    temperature: float = 1.0
    """Divides the logits of both models in the teacher's part of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillPlan(Distill):
    """The section, with a teacher."""

    teacher: str
    """A Hugging Face model directory, by its absolute path."""


ObjectivePlan = DPO | DistillPlan
"""An objective whose loss colotrain computes; each has other keys."""
