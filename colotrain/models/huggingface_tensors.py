"""Tensor parallelism of transformers' models, by their own `base_model_tp_plan`, read as data."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from colotrain.models.huggingface_attention import DIVISIBLE
from colotrain.models.huggingface_internals import tp_plan_of
from colotrain.models.tensor_parallel import DIVISIONS
from colotrain.models.tensor_parallel_styles import divisions_by
from colotrain.spec.divisions import Divisions

EXPERTS = ".experts"
"""Part of the names of a plan's entries for experts, which stay whole on every rank."""
EMBEDDING = "embedding_rowwise"
"""Style of an embedding, which stays whole on every rank, too."""
CANDIDATES = tuple(sorted({*DIVISIBLE, "gemma2"} - {"gemma3_text", "gpt2"}))
"""Model types of config.json; tests/dist/test_tensor_parallel.py compares each with plain torch.

Gemma 3 is left out: its plan does not say that ranks sum the gradients of the norms of queries and
keys. GPT-2 has no plan.
"""
VERIFIED: tuple[str, ...] = ()
"""Types that may train with `mesh.tp`: those that verify has proven in runs, too."""


def allow_parts_(model: nn.Module, config: Any) -> None:
    """Let `model` say how ranks can divide its matrices, or why they may not."""
    of_type = f"models of type {config.model_type} were not compared with one process"
    refused = functools.partial(Divisions, against=of_type)
    known = config.model_type in VERIFIED
    how = functools.partial(divisions_of, model, config) if known else refused
    setattr(model, DIVISIONS, how)


def divisions_of(model: nn.Module, config: Any) -> Divisions:
    """Return how the configuration's plan divides the layers; embedding and head stay whole."""
    plan = tp_plan_of(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    inside = {glob: style for glob, style in plan.items() if glob.startswith(prefix)}
    inside = {g: style for g, style in inside.items() if EXPERTS not in g and style != EMBEDDING}
    if not inside:
        return Divisions(against=f"transformers has no plan for {config.model_type}")
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        return Divisions(against=f"attention_dropout={dropout} would differ from one process")
    heads = config.num_attention_heads
    sizes = {"num_attention_heads": heads}
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
    return divisions_by(inside, model, sizes)
