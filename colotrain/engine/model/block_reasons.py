"""Which blocks cannot be groups, and why: what a trial of the model says of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.model.block_calls import (
    WITHOUT_VALUES,
    Calls,
    calls_with_values,
    calls_without_values,
)
from colotrain.engine.model.changed_inputs import CHANGING
from colotrain.engine.model.model_blocks import Block, parameter_bytes
from colotrain.forked import in_fork

LARGEST_REAL_TRIAL_BYTES = 2 << 30
IRREGULAR = "are called as values decide, or not once each"


def reasons_against(
    model: nn.Module,
    blocks: list[Block],
    batch: dict[str, Tensor],
    samples: Callable[[], dict[str, Tensor]] | None = None,
) -> dict[str, str]:
    """Return block name → reason why the block cannot be a group.

    A forward must call a group exactly once, use its parameters nowhere else, and not compute
    gradients through it; a penalty over all parameters, say, uses them outside their blocks, and
    one on gradients goes back through blocks that the rest of the forward still needs. The trial
    runs on a copy without storage, in a fork: on the meta device or, where that fails, with fake
    tensors, for which transformers skips its checks of values. A model whose forward must read
    values can run as neither. Then a real copy is tried with single samples, and a block counts
    only if its neighbours of the same kind get inputs of the same shape (experts that divide the
    tokens do not). If no trial runs, no block can be a group. A forward that draws random numbers
    is repeated with others: they may decide which layers run.
    """
    names = [name for name, _ in blocks]
    if (found := reasons_without_values(model, blocks, batch)) is not None:
        return found
    real = all(not p.is_meta for p in module_tree.parameters(model))
    if not real or parameter_bytes(model) > LARGEST_REAL_TRIAL_BYTES:
        return dict.fromkeys(names, "are in a model whose forward does not run without values")
    batch = batch if samples is None else samples()
    calls = calls_with_values(model, blocks, batch)
    if calls is None:
        return dict.fromkeys(names, "are in a model whose forward failed with one sample")
    regular = _regular(blocks, calls)
    return {n: _against(n, calls) or IRREGULAR for n in names if n not in regular}


def reasons_without_values(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor]
) -> dict[str, str] | None:
    """As `reasons_against`; None where no forward runs without values."""
    for mode in WITHOUT_VALUES:
        calls, changing = in_fork(partial(calls_without_values, model, blocks, batch, mode))
        if calls is not None:
            CHANGING.update(module for name, module in blocks if name in changing)
            return {name: why for name, _ in blocks if (why := _against(name, calls))}
    return None


def _against(name: str, calls: Calls) -> str:
    """Return why a block with these calls cannot be a group; "" where it can."""
    if name not in calls.shapes:
        return "have weights that are used outside them, or gradients that forward computes"
    if name in calls.unsteady:
        return IRREGULAR
    num = len(calls.shapes[name])
    return "" if num == 1 else f"are called {num} times" if num else "are not called"


def _regular(blocks: list[Block], calls: Calls) -> set[str]:
    kinds = {name: (name.rpartition(".")[0], type(module)) for name, module in blocks}
    shapes: dict[Any, set[Any]] = {}
    for name, seen in calls.shapes.items():
        shapes.setdefault(kinds[name], set()).update(seen)
    alone = Counter(
        kinds[name]
        for name, seen in calls.shapes.items()
        if len(seen) == 1 and name not in calls.unsteady
    )
    size = Counter(kinds.values())
    good = {kind for kind in size if alone[kind] == size[kind] and len(shapes[kind]) == 1}
    return {name for name, kind in kinds.items() if kind in good}
