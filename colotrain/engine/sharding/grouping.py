"""Decides which parameters are gathered and reduced together.

A group is gathered when its module is called, by all ranks together. So a module can be a group
only if every rank calls it exactly once in every forward, and no code outside that call uses its
parameters. A trial forward finds such modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.model.block_reasons import reasons_against
from colotrain.engine.model.model_blocks import (
    Block,
    Group,
    find_blocks,
    parameter_bytes,
    repeated_modules,
    sharded_parameters,
)
from colotrain.engine.sharding.fsdp_internals import HAS_SEVERAL_MODULES
from colotrain.spec.axes import DP_SHARD
from colotrain.spec.packing import Unit, pack
from colotrain.spec.plan import RunPlan
from colotrain.spec.precisions import PRECISIONS

LARGE_SHARE = 0.5
"""Part of all parameters above which a message says why the root group holds them."""
UNPACKED = (
    f"torch {torch.__version__}: each block is a group of its own (from 2.13 on they are packed to "
    "plugin.chunk_size)"
)


def find_groups(
    model: nn.Module,
    *,
    chunk_bytes: int | None,
    batch: dict[str, Tensor] | None,
    samples: Callable[[], dict[str, Tensor]] | None = None,
    kind: Callable[[str], Any] = lambda name: None,
    split: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[Group]:
    """Return the groups of `model`: name of the first module, and the modules.

    Each repeated block that the trial forward with `batch` calls once is a group; all other
    parameters belong to the root group. Without a batch there is no trial, and each block is a
    group. With `chunk_bytes`, neighbouring blocks of equal `kind(name)` are packed until a group
    reaches that size, and with `split` larger blocks are cut into modules that are called once.
    Groups are in the model's order, but inner modules come before the modules around them. `tell`
    is called with the reason where most of the parameters are left to the root group. `samples`
    reads a batch for forwards that look at values, instead of `batch`.
    """
    blocks = find_blocks(model)
    packs = chunk_bytes is not None and HAS_SEVERAL_MODULES
    inside = [part for block in blocks for part in _parts(*block)] if packs and split else []
    tried = [*blocks, *inside]
    against = reasons_against(model, tried, batch, samples) if batch is not None else {}
    callable_ = {name for name, _ in tried} - against.keys()
    if tell is not None and (text := _of_root(model, against)):
        tell(text)
    if not packs:
        return [(name, [module]) for name, module in blocks if name in callable_]
    units = [_unit(*block, callable_, split=split) for block in blocks if block[0] in callable_]
    return [
        (chunk.names[0], [model.get_submodule(name) for name in chunk.names])
        for chunk in pack(units, cast(int, chunk_bytes), kind)
    ]


def is_gathered(plan: RunPlan) -> bool:
    """Whether groups are gathered around each use. Ranks of a host may hold one copy instead."""
    cast_to, here = PRECISIONS[plan.train.precision], plan.cluster
    on_one_node = plan.ranks.on_one_node(DP_SHARD, procs_per_node=here.procs_per_node)
    shared = here.device == "cpu" and not cast_to.is_cast and on_one_node
    return plan.plugin.parameters_live == "use" and plan.plugin.dp_shard > 1 and not shared


def _of_root(model: nn.Module, against: Mapping[str, str]) -> str:
    """Return a message on the blocks in the root group if they are most of the model, or ""."""
    candidates, grouped = repeated_modules(model), {name for name, _ in find_blocks(model)}
    left = [(name, block) for name, block in candidates if name in against or name not in grouped]
    inside = {p for _, block in left for p in module_tree.parameters(block)}
    share = sum(p.numel() for p in inside) / max(
        1, sum(p.numel() for p in module_tree.parameters(model))
    )
    if len(candidates) < 2 or share <= LARGE_SHARE:
        return ""
    names_of: dict[str, list[str]] = {}
    for name, _ in left:
        names_of.setdefault(against.get(name, "share parameters with others"), []).append(name)
    told = (
        f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} {reason}"
        for reason, names in names_of.items()
    )
    return (
        f"{len(left)} of {len(candidates)} blocks, {share:.0%} of the parameters, are gathered all "
        f"at once: {'; '.join(told)}"
    )


def _parts(name: str, module: nn.Module) -> Iterator[Block]:
    """Yield modules in a block that share no parameter with the rest of the block."""
    owners = Counter(
        p for child in module_tree.children(module) for p in set(module_tree.parameters(child))
    )
    owners.update(p for p in module._parameters.values() if p is not None)
    for key, child in module_tree.named_children(module):
        own = set(module_tree.parameters(child))
        if own and all(owners[p] == 1 for p in own):
            yield f"{name}.{key}", child
            yield from _parts(f"{name}.{key}", child)


def _unit(name: str, module: nn.Module, callable_: set[str], *, split: bool) -> Unit:
    """Return a block as `pack` expects it; parts that cannot be groups belong to their parent."""

    def parts(name: str, module: nn.Module) -> Iterator[Unit]:
        for part, child in _parts(name, module):
            if part.count(".") != name.count(".") + 1:
                continue  # inside another part
            if part in callable_:
                yield _unit(part, child, callable_, split=True)
            else:
                yield from parts(part, child)

    return Unit(
        name=name,
        num_bytes=parameter_bytes(module),
        trained=any(p.requires_grad for p in module_tree.parameters(module)),
        dtypes=frozenset(p.dtype for p in sharded_parameters(module)),
        parts=tuple(parts(name, module)) if split else (),
    )
