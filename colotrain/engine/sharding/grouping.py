"""Decides which parameters are gathered and reduced together.

A group is gathered when its module is called, by all ranks together. So a module can be a group
only if every rank calls it exactly once in every forward, and no code outside that call uses its
parameters. A trial forward finds such modules.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.engine.model.changed_inputs import CHANGING, when_inputs_change
from colotrain.engine.model.model_blocks import (
    Block,
    Group,
    find_blocks,
    parameter_bytes,
    repeated_modules,
    sharded_parameters,
)
from colotrain.engine.sharding.fsdp_internals import HAS_SEVERAL_MODULES
from colotrain.forked import in_fork
from colotrain.models.objective import inputs_of
from colotrain.spec.axes import DP_SHARD
from colotrain.spec.packing import Unit, pack
from colotrain.spec.plan import RunPlan
from colotrain.spec.precisions import PRECISIONS
from colotrain.torch_internals import FakeTensorMode, tree_leaves

LARGEST_REAL_TRIAL_BYTES = 2 << 30
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
    kind: Callable[[str], Any] = lambda name: None,
    split: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[Group]:
    """Return the groups of `model`: name of the first module, and the modules.

    Each repeated block that the trial forward with `batch` calls once is a group; all other
    parameters belong to the root group. With `chunk_bytes`, neighbouring blocks of equal
    `kind(name)` are packed until a group reaches that size, and with `split` larger blocks are cut
    into modules that are called once. Groups are in the model's order, but inner modules come
    before the modules around them. `tell` is called with the reason where most of the parameters
    are left to the root group.
    """
    blocks = find_blocks(model)
    packs = chunk_bytes is not None and HAS_SEVERAL_MODULES
    inside = [part for block in blocks for part in _parts(*block)] if packs and split else []
    tried = [*blocks, *inside]
    against = reasons_against(model, tried, batch) if batch is not None else {}
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


def reasons_against(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor]
) -> dict[str, str]:
    """Return block name → reason why the block cannot be a group.

    A forward must call a group exactly once, use its parameters nowhere else, and not compute
    gradients through it; a penalty over all parameters, say, uses them outside their blocks, and
    one on gradients goes back through blocks that the rest of the forward still needs. The trial
    runs on a copy without storage, in a
    fork: on the meta device or, where that fails, with fake tensors, for which transformers skips
    its checks of values. A model whose forward must read values can run as neither. Then a real
    copy is tried with one sample, and a block counts only if its neighbours of the same kind get
    inputs of the same shape (experts that divide the tokens do not). If no trial runs, no block can
    be a group.
    """
    names = [name for name, _ in blocks]
    for mode in WITHOUT_VALUES:
        calls, changing = in_fork(partial(_without_values, model, blocks, batch, mode))
        if calls is not None:
            CHANGING.update(module for name, module in blocks if name in changing)
            return {name: why for name in names if (why := _against(calls.get(name)))}
    real = all(not p.is_meta for p in module_tree.parameters(model))
    if not real or parameter_bytes(model) > LARGEST_REAL_TRIAL_BYTES:
        return dict.fromkeys(names, "are in a model whose forward does not run without values")
    one = {name: tensor[:1].clone() for name, tensor in batch.items()}
    calls = _trial(copy.deepcopy, model, blocks, one, mode=torch.device("cpu"))
    if calls is None:
        return dict.fromkeys(names, "are in a model whose forward failed with one sample")
    regular = _regular(blocks, calls)
    irregular = "are called as values decide, or not once each"
    return {n: _against(calls.get(n)) or irregular for n in names if n not in regular}


WITHOUT_VALUES: tuple[Callable[[], Any], ...] = (
    partial(torch.device, "meta"),
    partial(FakeTensorMode, allow_non_fake_inputs=True),
)
"""Modes in which a forward runs without values. Fake tensors, which load torch's compiler, are
rarely needed. Each mode needs a fork of its own: what is kept in one is of no use to the next."""


def _without_values(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor], mode: Callable[[], Any]
) -> tuple[dict[str, list[Any]] | None, set[str]]:
    """Return what `_trial` finds, and the names of the blocks that change their inputs."""
    calls = _trial(without_storage, model, blocks, batch, mode=mode())
    return calls, {name for name, module in blocks if module in CHANGING}


def _against(calls: list[Any] | None) -> str:
    """Return why a block with these calls cannot be a group; "" where it can."""
    if calls is None:
        return "have weights that are used outside them, or gradients that forward computes"
    if len(calls) == 1:
        return ""
    return f"are called {len(calls)} times" if calls else "are not called"


def _regular(blocks: list[Block], calls: dict[str, list[Any]]) -> set[str]:
    kinds = {name: (name.rpartition(".")[0], type(module)) for name, module in blocks}
    shapes: dict[Any, set[Any]] = {}
    for name, seen in calls.items():
        shapes.setdefault(kinds[name], set()).update(seen)
    alone = Counter(kinds[name] for name, seen in calls.items() if len(seen) == 1)
    size = Counter(kinds.values())
    good = {kind for kind in size if alone[kind] == size[kind] and len(shapes[kind]) == 1}
    return {name for name, kind in kinds.items() if kind in good}


def without_storage(thing: Any) -> Any:
    """Copy a model or a batch, with empty tensors made under the active torch mode."""
    if isinstance(thing, dict):
        return {name: _empty_like(tensor) for name, tensor in thing.items()}
    memo: dict[int, Any] = {}
    for parameter in module_tree.parameters(thing):
        memo[id(parameter)] = nn.Parameter(_empty_like(parameter), parameter.requires_grad)
    for buffer in module_tree.buffers(thing):
        memo[id(buffer)] = _empty_like(buffer)
    return copy.deepcopy(thing, memo)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _trial(
    make_copy: Callable[[Any], Any],
    model: nn.Module,
    blocks: list[Block],
    batch: dict[str, Tensor],
    *,
    mode: Any,
) -> dict[str, list[Any]] | None:
    """Return block name → shape of each call's first input; None where the forward does not run.

    Blocks whose parameters are used outside their calls, and those that a backward within forward
    reaches, in training or evaluation, are left out.
    Blocks that change their inputs in place are put into CHANGING.
    """
    seen: dict[str, list[Any]] = {name: [] for name, _ in blocks}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            first = args[0] if args else None
            seen[name].append(tuple(first.shape) if isinstance(first, Tensor) else None)

        return hook

    state = torch.get_rng_state()
    try:
        with torch.no_grad(), mode:
            trial, inputs = make_copy(model), make_copy(inputs_of(model, batch))
            uses = UsesOutside((name, trial.get_submodule(name)) for name, _ in blocks)
            for name, module in blocks:
                block = trial.get_submodule(name)
                block.register_forward_pre_hook(note(name))
                block.register_forward_hook(partial(uses.note_backward, name))
                when_inputs_change(block, partial(CHANGING.add, module))
            with uses:
                trial(**inputs)
            calls = {name: list(shapes) for name, shapes in seen.items()}  # in training only
            with suppress(Exception), uses:  # evaluation may have other uses outside
                trial.eval()
                trial(**inputs)
    except Exception:  # whatever a user's forward raises: training will raise it again
        return None
    finally:
        torch.set_rng_state(state)
    return {name: shapes for name, shapes in calls.items() if name not in uses.found}


class UsesOutside(TorchFunctionMode):
    """Finds blocks whose parameters are used in a computation while the block is not running, and
    blocks that a backward reaches."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.running: Counter[str] = Counter()
        self.blocks_of: dict[Tensor, list[str]] = {}
        for name, block in blocks:
            block.register_forward_pre_hook(partial(self._run, name, 1), prepend=True)
            block.register_forward_hook(partial(self._run, name, -1))
            for parameter in module_tree.parameters(block):
                self.blocks_of.setdefault(parameter, []).append(name)

    def _run(self, name: str, change: int, *_: Any) -> None:
        self.running[name] += change

    def note_backward(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Find the block if a backward comes to an output of it: the trial itself calls none."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.found.add(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [
            name
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, nn.Parameter)
            for name in self.blocks_of.get(leaf, ())
            if not self.running[name]
        ]
        if used and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.found.update(used)  # a dtype, say, can be asked for anywhere
        return result
