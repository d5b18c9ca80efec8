"""What is done per block before sharding: compiling, and recomputing activations.

Both replace a block's `forward` in place, inside `fully_shard`'s hooks and with no wrapper
module, so that parameter names stay the model's own.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colotrain.engine.grouping import find_blocks


def compile_blocks_(model: nn.Module) -> None:
    """torch.compile each repeated block (the whole model where there is none)."""
    for module in _blocks(model):
        module.forward = torch.compile(module.forward)


def checkpoint_blocks_(model: nn.Module) -> None:
    """Recompute each block's activations in backward. Non-reentrant: the reentrant kind silently
    drops gradients of what follows a frozen prefix."""
    for module in _blocks(model):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_blocks(model)] or [model]
