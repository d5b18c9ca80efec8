"""Expert parallelism: the ranks of a group divide the experts of every layer among themselves.

The ranks of a group read different samples. Each holds 1/N of the experts, and everything else of
the model. Where tokens meet experts, each token goes to the ranks that have experts of its own,
once to each of them, with its gates; the experts' weighted outputs come back and are added (GShard,
Lepikhin et al. 2020). No expert has a capacity: a rank takes all tokens that the routers of its
group send, so that outputs are those of one process.

A rank's experts then have the gradients of all tokens of the group, and every other parameter has
the gradient of this rank's samples alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem, UsageError, suggest
from colotrain.models import adapters
from colotrain.models.adapter_kinds.parameters import ParameterAdapter
from colotrain.models.graphs import run_eagerly
from colotrain.models.quantized.experts import expert_stacks, stacks_of
from colotrain.spec.axes import EP
from colotrain.spec.divisions import Divisions
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import has_hooks

EXPERTS = "experts"
"""Style of modules whose parameters are [experts, …], in `Divisions`."""
LISTS = ("experts", "expert")
"""Names of lists of modules, of which each is an expert."""
Rows = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(slots=True, eq=False, kw_only=True)
class ExpertShard:
    """One rank of a group that divides experts. All ranks must make the same calls."""

    rank: int
    size: int
    """Ranks of the group."""
    all_to_all: Rows | None = None
    """Returns the rows that other ranks send, given own ones with the numbers of rows to and from
    each rank. None: the rank's own experts stand for all of them, in a trial forward."""
    calls: int = 0
    """Number of exchanges so far, as far as trials count them."""
    exchanged_bytes: int = 0
    """Most bytes of the tokens that they sent."""

    def count(self, tokens: Tensor, num_chosen: int) -> None:
        """Note the exchanges of a forward and its backward, of tokens that go to all ranks."""
        copies = min(num_chosen, self.size)
        self.calls += 8  # counts, indices, tokens, gates and outputs; three of them again
        self.exchanged_bytes += 4 * copies * tokens.nbytes


def expert_divisions(model: nn.Module, plan: ModelPlan) -> Divisions:
    """Return how the experts of `model` are divided; `against` says why they cannot be.

    Raises `ConfigError` for everything in `mesh.ep_plan` that cannot be right.
    """
    modules = dict(adapters.own_modules(model))
    if plan.ep_plan:
        problems = list(_problems_of(plan.ep_plan, modules))
        if problems:
            raise ConfigError(problems)
        found = [n for n in modules if any(fnmatchcase(n, glob) for glob in plan.ep_plan)]
    else:
        found = [n for n, m in modules.items() if next(expert_stacks(m), None) or stacks_of(m)]
        for name, module in modules.items():
            is_list = isinstance(module, nn.ModuleList) and len(module) > 1
            if is_list and name.rpartition(".")[2] in LISTS:
                against = f"{name} is a list of modules, which compute one after the other"
                return Divisions(axis=EP, against=against)
        for name in found:
            if why := _unknown(modules[name]):
                return Divisions(axis=EP, against=f"{name} {why}")
    if not found:
        return Divisions(axis=EP, against="it has no experts in one parameter [experts, …]")
    dims = {
        f"{name}.{key}": 0
        for name in found
        for key, p in modules[name]._parameters.items()
        if p is not None
    }
    for name in dims:
        if has_hooks(model.get_parameter(name)):
            return Divisions(axis=EP, against=f"a hook of {name} would get a part of its gradient")
    counts = {shape[0] for name in found for shape in _shapes(modules[name]).values()}
    sizes = {"num_experts" if len(counts) == 1 else f"num_experts ({n})": n for n in counts}
    for name in found:
        for key, weight in stacks_of(modules[name]).items():
            if (num := weight.num_in_blocks) > 1:
                block = weight.scheme.block_of(weight.inputs)
                named = f"whole blocks of {block} numbers in {name}.{key} ({num} experts each)"
                sizes[named] = weight.shape[0] // num if weight.shape[0] % num == 0 else 1
    how = Divisions(axis=EP, dims=dims, sizes=sizes, styles=dict.fromkeys(found, EXPERTS))
    return adapters.divide(how, model)


def _problems_of(globs: Sequence[str], modules: dict[str, nn.Module]) -> Iterator[Problem]:
    known = suggest("", {name for name, module in modules.items() if module._parameters})
    for glob in globs:
        matched = [name for name in modules if fnmatchcase(name, glob)]
        if not matched:
            expected = "the names of modules of experts"
            yield Problem(key="mesh.ep_plan", value=glob, expected=expected, fix=known)
        for name in matched:
            if why := _not_experts(modules[name]):
                expected = f"modules whose parameters are all [experts, …] ({name} {why})"
                yield Problem(key="mesh.ep_plan", value=glob, expected=expected, fix="leave it out")
                break


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters, also where it holds blocks of them."""
    found = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    for key, weight in stacks_of(module).items():
        del found[weight.scales_key]
        found[key] = (weight.num_entries, *weight.shape[1:])
    return found


def _not_experts(module: nn.Module) -> str:
    """Why not all of a module's parameters are those of as many experts; "" if they are."""
    children = [child for child in module.children() if not isinstance(child, ParameterAdapter)]
    if any(True for child in children for _ in module_tree.parameters(child)):
        return "has modules with parameters inside"
    given = inspect.signature(module.forward).parameters
    names = list(given)
    if len(names) < 3 or any(given[name].kind not in BY_PLACE for name in names[:3]):
        return f"takes ({', '.join(names)}), not tokens, indices of experts and gates"
    shapes = _shapes(module)
    if not shapes or any(not shape for shape in shapes.values()):
        return "has none of its own" if not shapes else "has a scalar"
    if len({shape[0] for shape in shapes.values()}) > 1:
        return f"has {', '.join(f'{key} {list(shape)}' for key, shape in shapes.items())}"
    return ""


def _unknown(module: nn.Module) -> str:
    """Why a module with a stack of experts is not called as known ones are; "" if it is."""
    if why := _not_experts(module):
        return why
    names = list(inspect.signature(module.forward).parameters)
    known = len(names) == 3 and "ind" in names[1] and "weight" in names[2]
    return "" if known else f"takes ({', '.join(names)}), not tokens, indices of experts and gates"


def share_tokens_(model: nn.Module, divisions: Divisions, shard: ExpertShard) -> None:
    """Let modules that hold a part of the experts compute for the tokens of all ranks."""
    for name in divisions.styles:
        module: Any = model.get_submodule(name)
        num_local = next(iter(_shapes(module).values()))[0]
        if hasattr(module, "num_experts"):
            module.num_experts = num_local
        inputs = functools.partial(_inputs, name, inspect.signature(module.forward))
        module.forward = functools.partial(
            run_eagerly, _exchanged, module, module.forward, inputs, num_local, shard
        )


def _inputs(
    name: str, signature: inspect.Signature, /, *given: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, indices of experts and gates, in the order of the signature.

    Raises `UsageError` where a call of the module `name` gives something else.
    """
    try:
        bound = signature.bind(*given, **named).arguments
    except TypeError as error:
        raise _called_otherwise(name, str(error)) from None
    found = tuple(bound.values())
    if len(found) != 3 or not all(isinstance(each, Tensor) for each in found):
        raise _called_otherwise(name, f"it gets ({', '.join(bound)})")
    tokens, index, gates = found
    is_integral = not (index.is_floating_point() or index.is_complex())
    is_shaped = 0 < index.ndim == tokens.ndim and index.shape[:-1] == tokens.shape[:-1]
    if not is_integral or index.dtype is torch.bool or not is_shaped or index.shape != gates.shape:
        shown = (f"{key} {list(t.shape)} of {t.dtype}" for key, t in bound.items())
        raise _called_otherwise(name, f"it gets {', '.join(shown)}")
    return tokens, index, gates


def _called_otherwise(name: str, found: str) -> UsageError:
    expected = "tokens [..., d], integers [..., k] that are indices of experts, and gates [..., k]"
    return UsageError(
        f"mesh.ep: {name} cannot exchange tokens: {found}, not {expected}, in this order",
        "change its forward, or set mesh.ep=1",
    )


def _exchanged(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Callable[..., tuple[Tensor, Tensor, Tensor]],
    num_local: int,
    shard: ExpertShard,
    /,
    *given: Any,
    **named: Any,
) -> Tensor:
    """Return the summed outputs of all experts for the tokens among the inputs [..., d]."""
    hidden_states, index, gates = inputs(*given, **named)
    index, gates = index.reshape(-1, index.shape[-1]), gates.reshape(-1, gates.shape[-1])
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if shard.all_to_all is None:
        shard.count(tokens, index.shape[-1])
        return forward(tokens, index % num_local, gates).view(hidden_states.shape)
    ranks = torch.arange(shard.size, device=index.device)
    is_sent = (index // num_local == ranks.view(-1, 1, 1)).any(-1)  # [ranks, tokens]
    rank, token = is_sent.nonzero(as_tuple=True)
    local = index[token] - (rank * num_local).unsqueeze(1)
    sent = is_sent.sum(1)
    received = shard.all_to_all(sent, [1] * shard.size, [1] * shard.size)
    counts = tuple(sent.tolist()), tuple(received.tolist())
    here = torch.where((local >= 0) & (local < num_local), local, -1)
    own_index = shard.all_to_all(here, *counts)
    of_ranks = token.split(counts[0])
    own = _Exchange.apply(shard, counts, *(_taken(each, of_ranks) for each in (tokens, gates)))
    outputs = _computed(module, forward, own[0], own[1], own_index)
    (outputs,) = _Exchange.apply(shard, counts[::-1], outputs)
    return _put(outputs, of_ranks, len(tokens)).view(hidden_states.shape)


def _computed(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    tokens: Tensor,
    gates: Tensor,
    index: Tensor,
) -> Tensor:
    """Return the sum of this rank's experts' outputs for each of `tokens` [n, d].

    `index` [n, k] is -1 for experts of other ranks.
    """
    is_own = (index >= 0).T  # [k, n]
    column, row = is_own.nonzero(as_tuple=True)
    if not len(row):  # other ranks' backward waits for this one's
        used = sum(p[:0].sum() for p in module._parameters.values() if p is not None)
        return tokens + used + gates.sum()
    rows = row.split(tuple(is_own.sum(1).tolist()))
    each = forward(
        _taken(tokens, rows), index[row, column].unsqueeze(1), gates[row, column].unsqueeze(1)
    )
    return _put(each.to(tokens.dtype), rows, len(tokens))  # the dtype of ranks without a token, too


def _taken(tokens: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Return the tokens of all of `rows`, one after the other.

    No number comes twice among those of one of `rows`. So no gradients of a token are added in an
    order that a GPU chooses: ranks of `mesh.tp` that compute the same get the same bits.
    """
    return torch.cat([tokens.index_select(0, each) for each in rows])


def _put(values: Tensor, rows: Sequence[Tensor], num: int) -> Tensor:
    """Return [num, d], to whose rows `values` are added in the order of `rows`, as in `_taken`."""
    summed = values.new_zeros(num, values.shape[-1])
    for each, part in zip(rows, values.split([len(each) for each in rows]), strict=True):
        summed = summed.index_add(0, each, part)
    return summed


class _Exchange(torch.autograd.Function):
    """Rows that all ranks send one another; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, shard: ExpertShard, counts: Any, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.counts = shard, counts
        return _sent(shard, counts, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_sent(ctx.shard, ctx.counts[::-1], gradients)


def _sent(shard: ExpertShard, counts: Any, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    assert shard.all_to_all is not None
    return tuple(shard.all_to_all(each.contiguous(), *counts) for each in rows)
