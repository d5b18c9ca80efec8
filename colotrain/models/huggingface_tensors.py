"""Tensor parallelism of transformers' models, by their own `base_model_tp_plan`, read as data."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from colotrain import module_tree
from colotrain.models.huggingface_images import modules_of_images, parameters_of_images
from colotrain.models.huggingface_internals import tp_plan_of
from colotrain.models.huggingface_loss import balances_experts, holds_all_logits
from colotrain.models.huggingface_small import head_counts
from colotrain.models.tensor_parallel import DIVISIONS
from colotrain.models.tensor_parallel_styles import (
    ROWS,
    SUMMED,
    divisions_by,
    layers_of,
    problems_of,
)
from colotrain.spec.divisions import VOCABULARY, Divisions

EXPERTS = ".experts"
"""Part of the names of a plan's entries for experts, which stay whole on every rank."""
UNDIVIDED = ("embedding_rowwise", "embedding_colwise", "replicate", "local_params")
"""Styles of embeddings, which are divided with the loss or not at all, and of what stays whole.

Parameters of attention itself (`local_params`) are divided by their shapes.
"""
PACKED = "packed_colwise"
GATHERED = "colwise_gather_output", "rowwise_split_input"
"""Styles of layers of which one makes several things at once, and the next takes one."""
NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""A layer's number in the name of a module."""


def allow_parts_(model: Any) -> None:
    """Let `model` say how ranks can divide its matrices, or why they may not."""
    setattr(model, DIVISIONS, functools.partial(divisions_of, model, model.config))


def has_plan(model: Any) -> bool:
    """Whether transformers has a plan for the model, with any head or none.

    Others may have a plan of the user's (`mesh.tp_plan`).
    """
    return bool(_own_plan(model)) and not model.config.is_encoder_decoder


def divisions_of(model: nn.Module, config: Any) -> Divisions:
    """Return how the configuration's plan divides the layers, and the loss its vocabulary.

    Of an image-text model these are the language model's: what reads images is whole on all ranks.
    """
    dropout = getattr(config.get_text_config(), "attention_dropout", 0.0)
    if dropout:
        return Divisions(against=f"attention_dropout={dropout} would differ from one process")
    images = tuple(f"{name}." for name in modules_of_images(model))
    if config.get_text_config() is not config and not images:
        return Divisions(against="it reads more than texts, and not as an image-text model")
    named = module_tree.named_modules(model)
    modules = {n: m for n, m in named if not f"{n}.".startswith(images or "\0")}
    plan = _own_plan(model) or plan_by_shapes(model)
    # a plan is of all models of a type: dense layers and experts, say
    held = _gathering_packed({g: s for g, s in plan.items() if fnmatch.filter(modules, g)})
    if not held:
        return Divisions(against=_why_no_plan(modules, config.model_type))
    held = {**held, **_norms_of_heads(modules, held)}
    for problem in problems_of(held, model):
        return Divisions(against=f"its plan has {problem.value!r}, expected {problem.expected}")
    found = divisions_by(held, model, head_counts(config.get_text_config()))
    found = replace(found, dims={**found.dims, **_parameters_of_heads(modules, found)})
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
    return {glob: s for glob, s in inside.items() if EXPERTS not in glob and s not in UNDIVIDED}


def plan_by_shapes(model: Any) -> dict[str, str]:
    """A plan of the layers of a model for which transformers has none.

    A module that holds several linears, of which the last one returns to the width that all
    others begin with, is attention or an MLP: its last linear is divided by inputs, the others by
    outputs. One matrix that makes queries, keys and values, or gate and up, is gathered. What reads
    images stays whole.
    """
    plan: dict[str, str] = {}
    images = tuple(f"{name}." for name in modules_of_images(model))
    for name, parent in module_tree.named_modules(model):
        if images and name.startswith(images):
            continue
        children = module_tree.named_children(parent)
        linears = {f"{name}.{key}": c for key, c in children if type(c) is nn.Linear}
        if not NUMBER.search(name) or EXPERTS in name or len(linears) < 2:
            continue
        *first, last = linears.values()
        if any(each.in_features != last.out_features for each in first):
            continue
        inner = last.in_features
        packed = len(first) == 1 and first[0].out_features != inner
        styles = (
            ("colwise_gather_output", "rowwise_split_input") if packed else (ROWS[0], "rowwise")
        )
        if not packed and max(each.out_features for each in first) != inner:
            continue
        names = [NUMBER.sub(".*", each) for each in linears]
        plan |= {**dict.fromkeys(names[:-1], styles[0]), names[-1]: styles[1]}
    return plan


def _why_no_plan(modules: Mapping[str, nn.Module], kind: str) -> str:
    """Why a model without a plan gets none by shapes: the first layer with a matrix, by name."""
    for name, module in modules.items():
        matrices = [p for p in module._parameters.values() if p is not None and p.ndim > 1]
        if matrices and NUMBER.search(name):
            of_class = f"no rule for {name}, a {type(module).__name__}"
            return f"transformers has no plan for {kind}, and there is {of_class}"
    return f"transformers has no plan for {kind}, which has no numbered layers"


def _gathering_packed(plan: dict[str, str]) -> dict[str, str]:
    """The plan with `packed_colwise` layers, such as gate and up in one, gathered."""
    parents = {glob.rpartition(".")[0] for glob, style in plan.items() if style == PACKED}
    gathered = {PACKED: "colwise_gather_output", "rowwise": "rowwise_split_input"}
    return {
        g: gathered.get(s, s) if g.rpartition(".")[0] in parents else s for g, s in plan.items()
    }


def _norms_of_heads(modules: dict[str, nn.Module], plan: dict[str, str]) -> dict[str, str]:
    """Norms of single heads that the plan leaves out, in attention that has some of the heads."""
    found: dict[str, str] = {}
    for parent, children in _with_parts(modules, plan):
        size = getattr(modules[parent], "head_dim", None)
        for name, child in children:
            weight, known = getattr(child, "weight", None), _style(plan, name)
            if not known and weight is not None and tuple(weight.shape) == (size,):
                found[NUMBER.sub(".*", name)] = SUMMED
    return found


def _parameters_of_heads(modules: dict[str, nn.Module], how: Divisions) -> dict[str, int]:
    """Parameters with a number for each head, such as sinks, where a rank has some of the heads."""
    found: dict[str, int] = {}
    for parent, _ in _with_parts(modules, how.styles):
        for key, parameter in modules[parent]._parameters.items():
            if parameter is not None and parameter.shape[0] in how.sizes.values():
                found[NUMBER.sub(".*", f"{parent}.{key}")] = 0
    return found


def _with_parts(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str]
) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """The modules that hold layers divided by outputs and not gathered, and what they hold."""
    for name, module in modules.items():
        children = [(f"{name}.{key}", c) for key, c in module_tree.named_children(module)]
        if any(_style(plan, child) == "colwise" for child, _ in children):
            yield name, children


def _style(plan: Mapping[str, str], name: str) -> str:
    return next((s for glob, s in plan.items() if fnmatch.fnmatchcase(name, glob)), "")


def _vocabulary_of(model: Any) -> list[str]:
    """Names of the head and embedding, of which ranks can hold parts of the vocabulary."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    tied = head is not None and head.weight is embedding.weight
    if head is None or holds_all_logits(model) or (tied and not plain):
        return []
    divided = (head, embedding) if plain else (head,)
    return [name for name, module in module_tree.named_modules(model) if module in divided]
