"""Decides which parameters are gathered and reduced together.

A group is gathered when its module is called, by all ranks together. So a module can be a group
only if every rank calls it exactly once in every forward, and no code outside that call uses its
parameters. A trial forward finds such modules.
"""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.data.read.draws import generators, same_generators
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
from colotrain.models.seeding import seeded
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
    samples: Callable[[], dict[str, Tensor]] | None = None,
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
    are left to the root group. `samples` reads a batch for forwards that look at values, instead of
    `batch`.
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
    for mode in WITHOUT_VALUES:
        calls, changing = in_fork(partial(_without_values, model, blocks, batch, mode))
        if calls is not None:
            CHANGING.update(module for name, module in blocks if name in changing)
            return {name: why for name in names if (why := _against(name, calls))}
    real = all(not p.is_meta for p in module_tree.parameters(model))
    if not real or parameter_bytes(model) > LARGEST_REAL_TRIAL_BYTES:
        return dict.fromkeys(names, "are in a model whose forward does not run without values")
    batch = batch if samples is None else samples()
    calls = _trial(copy.deepcopy, model, blocks, batch, mode=torch.device("cpu"), with_values=True)
    if calls is None:
        return dict.fromkeys(names, "are in a model whose forward failed with one sample")
    regular = _regular(blocks, calls)
    return {n: _against(n, calls) or IRREGULAR for n in names if n not in regular}


IRREGULAR = "are called as values decide, or not once each"
NUM_FORWARDS = 12
"""Forwards of a model that draws random numbers, or looks at the values of its samples."""
MOST_SECONDS = 10.0
"""Seconds after which none of these begins."""
WITHOUT_VALUES: tuple[Callable[[], Any], ...] = (
    partial(torch.device, "meta"),
    partial(FakeTensorMode, allow_non_fake_inputs=True),
)
"""Modes in which a forward runs without values. Fake tensors, which load torch's compiler, are
rarely needed. Each mode needs a fork of its own: what is kept in one is of no use to the next."""


def _without_values(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor], mode: Callable[[], Any]
) -> tuple[Calls | None, set[str]]:
    """Return what `_trial` finds, and the names of the blocks that change their inputs."""
    calls = _trial(without_storage, model, blocks, batch, mode=mode())
    return calls, {name for name, module in blocks if module in CHANGING}


@dataclass(frozen=True, slots=True)
class Calls:
    """What a trial found of blocks that it called, by name."""

    shapes: dict[str, list[Any]]
    """Shape of the first input of each call in one forward."""
    unsteady: frozenset[str]
    """Blocks that other random numbers, or another sample, call in another way."""


def _against(name: str, calls: Calls) -> str:
    """Return why a block with these calls cannot be a group; "" where it can."""
    if name not in calls.shapes:
        return "have weights that are used outside them, or gradients that forward computes"
    if name in calls.unsteady:
        return IRREGULAR
    num = len(calls.shapes[name])
    return "" if num == 1 else f"are called {num} times" if num else "are not called"


def _kinds(blocks: list[Block]) -> dict[str, Any]:
    return {name: (name.rpartition(".")[0], type(module)) for name, module in blocks}


def _regular(blocks: list[Block], calls: Calls) -> set[str]:
    kinds = _kinds(blocks)
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


def _unsteady(blocks: list[Block], forwards: list[list[str]]) -> frozenset[str]:
    """Return the blocks whose calls differ between forwards, with all others of their kind."""
    kinds, first = _kinds(blocks), forwards[0]
    found: set[Any] = set()
    for other in forwards[1:]:
        counts, others = Counter(first), Counter(other)
        found |= {kinds[name] for name in kinds if counts[name] != others[name]}
        steady = [[n for n in names if kinds[n] not in found] for names in (first, other)]
        if steady[0] != steady[1]:
            found |= {kinds[name] for name in first}
    return frozenset(name for name, kind in kinds.items() if kind in found)


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
    with_values: bool = False,
) -> Calls | None:
    """Return how forwards call the blocks; None where a forward does not run.

    Blocks whose parameters are used outside their calls, and those that a backward within forward
    reaches, in training or evaluation, are left out.
    Blocks that change their inputs in place are put into CHANGING.
    """
    seen: list[tuple[str, Any]] = []

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            first = args[0] if args else None
            seen.append((name, tuple(first.shape) if isinstance(first, Tensor) else None))

        return hook

    size = min((len(t) for t in batch.values() if t.ndim), default=1) if with_values else 1

    def run(number: int) -> list[str]:
        seen.clear()
        uses.running.clear()
        own = slice(number % size, number % size + 1) if with_values else slice(None)
        some = {name: tensor[own] if tensor.ndim else tensor for name, tensor in batch.items()}
        trial(**make_copy(inputs_of(model, some)))
        return [name for name, _ in seen]

    try:
        with torch.no_grad(), mode:
            trial = make_copy(model)
            uses = UsesOutside((name, trial.get_submodule(name)) for name, _ in blocks)
            for name, module in blocks:
                block = trial.get_submodule(name)
                block.register_forward_pre_hook(note(name))
                block.register_forward_hook(partial(uses.note_backward, name))
                when_inputs_change(block, partial(CHANGING.add, module))
            with uses, seeded(0):
                before = generators()
                forwards = [run(0)]
                draws = not same_generators(before, generators())
            calls = {name: [shape for n, shape in seen if n == name] for name, _ in blocks}
            end = time.monotonic() + MOST_SECONDS
            for number in range(1, NUM_FORWARDS if draws or size > 1 else 1):
                if time.monotonic() > end:
                    break
                with suppress(Exception), uses, seeded(number), _extreme(number):
                    forwards.append(run(number))
            with suppress(Exception), uses, seeded(0):  # evaluation may have other uses outside
                trial.eval()
                run(0)
    except Exception:  # whatever a user's forward raises: training will raise it again
        return None
    calls = {name: shapes for name, shapes in calls.items() if name not in uses.found}
    return Calls(shapes=calls, unsteady=_unsteady(blocks, forwards))


def _extreme(number: int) -> AbstractContextManager[Any]:
    """Let the first two repetitions draw the least and the largest numbers from 0 to 1."""
    values = {1: 0.0, 2: 1.0 - 2.0**-20}
    return Drawing(values[number]) if number in values else nullcontext()


class Drawing(TorchFunctionMode):
    """Lets uniform numbers be `value`: a layer that any draw leaves out is left out, or runs."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __enter__(self) -> Any:
        self.python, random.random = random.random, lambda: self.value
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        random.random = self.python
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(self.value) if func in (torch.rand, torch.rand_like) else found


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
