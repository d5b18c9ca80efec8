"""Compiling blocks and recomputing their activations, both set up before sharding.

Both replace a block's `forward` in place, inside `fully_shard`'s hooks and without a wrapper
module, so that parameter names do not change.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from colotrain import module_tree
from colotrain.engine.model.changed_inputs import when_inputs_change
from colotrain.engine.model.model_blocks import find_blocks
from colotrain.engine.model.module_state import ModuleState
from colotrain.errors import UsageError
from colotrain.models.documents import leave_graphs_for_documents
from colotrain.spec.plan import Recompute
from colotrain.torch_internals import (
    COMPUTED_AGAIN,
    OpOverload,
    arguments_of,
    is_in_transform,
    is_random,
    storage_id,
    tree_leaves,
)

COSTLY = {
    *(f"aten::{name}" for name in ("mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm")),
    *(f"aten::{name}" for name in ("linear", "mkldnn_linear", "convolution", "_convolution")),
    *(f"aten::{name}" for name in ("_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm")),
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
    "flex_attention",
}
"""Operations whose outputs `selective` keeps: matrix products, convolutions, attention."""


def compile_blocks_(model: nn.Module, own: Collection[nn.Module] | None = None) -> None:
    """Compile each repeated block, or the whole model if it has none.

    `own` are the blocks of this pipeline stage, where there are others.
    """
    leave_graphs_for_documents()
    for module in _blocks(model):
        if own is None or module in own:
            module.forward = torch.compile(module.forward)


def checkpoint_blocks_(model: nn.Module, recompute: Recompute) -> None:
    """Recompute each block's activations in backward: all of them, or those cheap to compute.

    Non-reentrant: the reentrant kind silently drops gradients of layers after a frozen prefix.
    """
    for module in _blocks(model) if recompute != "none" else ():
        when_inputs_change(module, functools.partial(_refuse, type(module).__name__, recompute))
        module.forward = Recomputed(module, keeps=recompute == "selective")


def _refuse(module: str, recompute: Recompute) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            f"train.activation_checkpointing={recompute}: forward of {module} "
            "changes what it is given in place, and would begin with that in backward",
            "set train.activation_checkpointing=none, or have the model make a new tensor there",
        )


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_blocks(model)] or [model]


class Recomputed:
    """A block's forward whose operations are computed again in backward; `keeps`: the cheap ones.

    Within a transform of torch.func nothing is: its tensors end with it. A copy of the block gets
    its own.
    """

    def __init__(self, module: nn.Module, *, keeps: bool) -> None:
        self.module, self.forward, self.state = module, module.forward, ModuleState(module)
        self.make_contexts = _contexts if keeps else _no_contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _has_backward(self.module, args, kwargs) or is_in_transform():
            return self.forward(*args, **kwargs)
        contexts = self.make_contexts
        if not torch.compiler.is_compiling():
            contexts = functools.partial(self.state.contexts, contexts)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _no_contexts() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


def _has_backward(module: nn.Module, args: Any, kwargs: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors = (*module_tree.parameters(module), *tree_leaves((args, kwargs)))
    return any(tensor.requires_grad for tensor in tensors if isinstance(tensor, Tensor))


def _contexts() -> tuple[Any, Any]:
    """Return torch's contexts for a block's forward and for its recomputation."""
    policy = _Policy()
    keeping, computing_again = create_selective_checkpoint_contexts(policy)
    policy.entries = keeping.storage
    return keeping, computing_again


class _Policy:
    """Selects the outputs of costly operations to keep, in one forward of one block.

    An operation that draws random numbers (attention with dropout) is computed again: if it were
    skipped, later random numbers would differ. An operation whose output is later changed in place
    (as torch's recurrent layers do) is also computed again: a kept tensor would be changed twice.
    """

    def __init__(self) -> None:
        self.entries: Any = {}
        """torch's storage: operation → index of the call → kept outputs."""
        self.calls: Counter[Any] = Counter()
        self.kept: dict[int, tuple[Any, int]] = {}
        """Storage of a kept output, which torch keeps alive → operation and index of the call."""

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operation.name() in COSTLY and not _draws(operation, args, kwargs)
        if context.is_recompute:  # only torch before 2.13 asks again
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
        for tensor in tree_leaves(getattr(context, "op_output", None)) if keeps else ():
            if isinstance(tensor, Tensor):
                self.kept[storage_id(tensor)] = operation, self.calls[operation]
        self.calls[operation] += 1
        written = list(_written_by(operation, args, kwargs))
        if written and not hasattr(context, "op_output"):  # before torch 2.12
            self.kept = self._kept_by_torch()
        for tensor in written:
            if storage_id(tensor) in self.kept:
                self._keep_no_more(*self.kept.pop(storage_id(tensor)), because=operation)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _kept_by_torch(self) -> dict[int, tuple[Any, int]]:
        return {
            storage_id(tensor): (operation, call)
            for operation, calls in self.entries.items()
            if operation.name() in COSTLY  # within torch.compile torch stores all others, too
            for call, entry in enumerate(calls)
            for kept in tree_leaves(entry)
            if isinstance(tensor := kept.val, Tensor)
        }

    def _keep_no_more(self, operation: Any, call: int, *, because: Any) -> None:
        if COMPUTED_AGAIN is None:
            raise UsageError(
                "train.activation_checkpointing=selective: a block changes the result of a "
                f"matrix product, convolution or attention in place ({because})",
                "set train.activation_checkpointing=full, or use torch 2.13",
            )
        self.entries[operation][call] = COMPUTED_AGAIN


def _written_by(operation: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that a call changes in place."""
    for index, name in _written(operation):
        tensor = args[index] if index < len(args) else kwargs.get(name)
        if isinstance(tensor, Tensor):
            yield tensor


@functools.cache
def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operation changes in place."""
    if not isinstance(operation, OpOverload):
        return ()
    arguments = enumerate(arguments_of(operation))
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def _place_of_dropout(operation: Any) -> int | None:
    if not is_random(operation):
        return None
    names = [argument.name for argument in arguments_of(operation)]
    return names.index("dropout_p") if "dropout_p" in names else -1


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call advances the random number generator."""
    place = _place_of_dropout(operation)
    if place is None:
        return False
    return place < 0 or (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0
