"""Tensor parallelism of transformers' models, by their own `base_model_tp_plan`, read as data."""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import replace
from typing import Any

from torch import nn

from colotrain import module_tree
from colotrain.models.huggingface_images import parameters_of_images
from colotrain.models.huggingface_internals import tp_plan_of
from colotrain.models.huggingface_loss import balances_experts, holds_all_logits
from colotrain.models.tensor_parallel import DIVISIONS
from colotrain.models.tensor_parallel_styles import divisions_by, layers_of, problems_of
from colotrain.spec.divisions import VOCABULARY, Divisions

EXPERTS = ".experts"
"""Part of the names of a plan's entries for experts, which stay whole on every rank."""
EMBEDDING = "embedding_rowwise"
"""Style of an embedding, which is divided with the loss or not at all."""
VERIFIED = (
    "cohere",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Model types, of config.json, that may train with `mesh.tp`.

scripts/verified_models.py trains each with it and compares it with plain transformers.
"""


def allow_parts_(model: nn.Module, config: Any) -> None:
    """Let `model` say how ranks can divide its matrices, or why they may not."""
    kind = config.get_text_config().model_type  # what reads images is whole on all ranks
    how = functools.partial(divisions_of, model, config.get_text_config())
    if not _own_plan(model):
        how = functools.partial(Divisions, against=f"transformers has no plan for {kind}")
    elif kind not in VERIFIED:
        of_type = f"models of type {kind} were not compared with one process"
        how = functools.partial(Divisions, against=of_type)
    setattr(model, DIVISIONS, how)


def has_verified_parts(model: nn.Module, config: Any) -> bool:
    """Whether a model is of a type that may train with `mesh.tp`, with any head or none.

    Others may have a plan of the user's (`mesh.tp_plan`).
    """
    return config.model_type in VERIFIED and bool(_own_plan(model))


def divisions_of(model: nn.Module, config: Any) -> Divisions:
    """Return how its plan divides the layers of `config`, and the loss its vocabulary.

    Of an image-text model these are the language model's.
    """
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        return Divisions(against=f"attention_dropout={dropout} would differ from one process")
    names = [name for name, _ in module_tree.named_modules(model)]
    heads = config.num_attention_heads
    sizes = {"num_attention_heads": heads}
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
    plan = _own_plan(model)
    # a plan is of all models of a type: dense layers and experts, say
    held = {glob: s for glob, s in plan.items() if fnmatch.filter(names, glob)}
    for problem in problems_of(held, model):
        return Divisions(against=f"its plan has {problem.value!r}, expected {problem.expected}")
    found = divisions_by(held, model, sizes)
    if besides := _works_on_parts(model, found):
        return Divisions(against=f"its plan does not say how {besides} works on parts of heads")
    vocabulary = _vocabulary_of(model)
    dims = {f"{name}.{key}": 0 for name in vocabulary for key in ("weight", "bias")}
    found = replace(found, dims={**found.dims, **dims})
    found = replace(found, styles=found.styles | dict.fromkeys(vocabulary, VOCABULARY))
    by_tokens = len(vocabulary) > 1 and _treats_tokens_alike(model, found)
    return replace(found, divides_tokens=by_tokens, before=parameters_of_images(model))


def _treats_tokens_alike(model: nn.Module, divisions: Divisions) -> bool:
    """Whether layers treat tokens one by one outside of their parts, and none at random."""
    draws = any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in module_tree.modules(model)
    )
    return not draws and not balances_experts(model) and layers_of(model, divisions) is not None


def _own_plan(model: nn.Module) -> dict[str, str]:
    """The plan of the model's layers, without experts, embedding and head."""
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if hasattr(model, base) else ""
    inside = {glob: s for glob, s in tp_plan_of(model).items() if glob.startswith(prefix)}
    return {glob: s for glob, s in inside.items() if EXPERTS not in glob and s != EMBEDDING}


def _vocabulary_of(model: Any) -> list[str]:
    """Names of the head and embedding, of which ranks can hold parts of the vocabulary."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    tied = head is not None and head.weight is embedding.weight
    if head is None or holds_all_logits(model) or (tied and not plain):
        return []
    divided = (head, embedding) if plain else (head,)
    return [name for name, module in module_tree.named_modules(model) if module in divided]


def _works_on_parts(model: nn.Module, divisions: Divisions) -> str:
    """Name of a module with parameters beside divided ones that the plan leaves out; "" for none.

    Where all of them gather their outputs it works on whole ones, as OLMo 2's norms do.
    """
    styles = divisions.styles.items()
    for name, parent in module_tree.named_modules(model):
        children = [
            f"{name}.{key}"
            for key, c in module_tree.named_children(parent)
            if [*module_tree.parameters(c)]
        ]
        known = {c: next((s for g, s in styles if fnmatch.fnmatchcase(c, g)), "") for c in children}
        if "colwise" in known.values() and "" in known.values():
            return next(child for child, style in known.items() if not style)
    return ""
