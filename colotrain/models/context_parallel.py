"""Context parallelism: the ranks of a group divide every sample's tokens among themselves.

A sample is cut into 2n chunks, and rank r of n ranks holds chunks r and 2n - 1 - r. So all ranks
have the same amount of causal attention (section 3.3.2 of "The Llama 3 Herd of Models", Dubey et
al. 2024). Attention gathers the keys and values of the whole sample, and again in backward, so
that no layer keeps them; their gradients are summed on the rank that holds them. Everything else in
a decoder treats tokens one by one, and the loss is a sum over tokens, so that to the rest of the
engine the ranks are just data ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colotrain import module_tree
from colotrain.errors import UsageError
from colotrain.models.facts import facts_of
from colotrain.torch_internals import saves_tensors_by_hooks, storage_id

ATTRIBUTE = "sequence_shard"
"""Attribute of a model whose forward divides sequences where it is not None.

The forward gets whole samples, takes its own part of them, and attends with `attend`.
"""


Collective = Callable[[Tensor, Tensor], None]
"""(output, input) of an all-gather or reduce-scatter between the ranks of a group."""


def without_sending(output: Tensor, input: Tensor) -> None:
    """The collective of the meta device, where only shapes matter."""


@dataclass(slots=True, eq=False, kw_only=True)
class Samples:
    """The samples of one forward, whose attention may be computed again in backward."""

    length: int = 0
    """Tokens of each."""
    documents: Tensor | None = None
    """Document of each token, int64 [batch, length], where documents do not attend to others."""
    seen: Tensor | None = None
    """Bool [batch, length], False for padding that no token attends to; None: there is none."""
    is_causal: bool = True
    """Whether a token attends to none behind it."""
    masks: dict[Any, list[Tensor]] = field(default_factory=dict)
    """Masks of attention, which all layers share."""


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceShard:
    """The part of every sequence that one rank of a context-parallel group holds."""

    rank: int
    size: int
    """Ranks of the group."""
    device: str = "cpu"
    all_gather: Collective = without_sending
    """Sets [size * n, ...] to [n, ...] of every rank, in their order."""
    reduce_scatter: Collective = without_sending
    """Sets [n, ...] to this rank's part of the sum of all ranks' [size * n, ...]."""
    is_known_to_model: bool = False
    """Whether a model with a choice of attention functions was told to use `attend`."""
    calls: int = 0
    """Number of collectives so far."""
    exchanged_bytes: int = 0
    """Bytes of what they gathered and summed: keys and values of whole samples, and gradients."""
    samples: Samples = field(default_factory=Samples)
    """Those of the present forward: what computes it again puts them back."""

    def begin(
        self,
        length: int,
        documents: Tensor | None = None,
        *,
        seen: Tensor | None = None,
        is_causal: bool = True,
    ) -> None:
        """Begin the forward of a batch; `UsageError` where its tokens cannot be divided."""
        parts = 2 * self.size
        if length % parts:
            raise UsageError(
                f"mesh.cp={self.size}: samples of {length} tokens cannot be cut into {parts} parts",
                f"pad samples to a multiple of {parts} tokens, or set mesh.cp=1",
            )
        self.samples = Samples(length=length, documents=documents, seen=seen, is_causal=is_causal)

    @property
    def length(self) -> int:
        return self.samples.length

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token of each of the rank's two chunks, and the token after its last."""
        size = self.length // (2 * self.size)
        indices = self.rank, 2 * self.size - 1 - self.rank
        return [(index * size, (index + 1) * size) for index in indices]

    def own(self, tensor: Tensor) -> Tensor:
        """Return the rank's tokens of [..., length]."""
        return torch.cat([tensor[..., start:end] for start, end in self.chunks], dim=-1)

    def mask_of(self, like: Tensor, window: int | None) -> list[Tensor]:
        """Return what is added to attention's scores, for each of the rank's two chunks.

        It is [chunk, keys] or [batch, 1, chunk, keys] with the device and dtype of `like`, for the
        keys from the first to the chunk's last, or where tokens attend to those behind them to the
        sample's last: 0 where a token attends to a key, otherwise -infinity. With
        `window` a token attends to so many keys, itself included.
        """
        known = window, like.dtype
        made = self.samples.masks
        if known not in made:
            masks = [self._attends(start, end, like.device, window) for start, end in self.chunks]
            made[known] = [additive(mask, like.dtype) for mask in masks]
        return made[known]

    def _attends(self, start: int, end: int, device: torch.device, window: int | None) -> Tensor:
        samples = self.samples
        last = end if samples.is_causal else samples.length
        keys = torch.arange(last, device=device)
        queries = keys[start:end].unsqueeze(1)
        attends = (keys <= queries) | (not samples.is_causal)
        if samples.seen is not None:
            attends = attends & samples.seen[:, None, None, :last]
        if window is not None:
            assert samples.is_causal, "no encoder with a window is known to be divisible"
            attends &= keys > queries - window
        if samples.documents is None:
            return attends
        of_keys = samples.documents[:, None, None, :last]
        return attends & (of_keys == samples.documents[:, None, start:end, None])

    def count(self, whole: Tensor) -> None:
        """Count a collective whose larger tensor is `whole`."""
        self.calls += 1
        self.exchanged_bytes += whole.nbytes


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where the bool `mask` is True, and -infinity elsewhere.

    Attention with a bool mask makes such a tensor in every layer, and keeps it for backward.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def divide_sequences_(model: nn.Module, shard: SequenceShard) -> None:
    """Let `model`, which must have `sequence_shard`, train on the part that `shard` describes."""
    for module in module_tree.modules(model):
        setattr(module, ATTRIBUTE, shard)
    if (divide := facts_of(model).divide) is not None:
        divide(model)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: SequenceShard,
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Return attention of this rank's tokens to those of the whole sample, causal as `begin` says.

    All are [batch, heads, own tokens, head size]. `options` are further arguments of
    `scaled_dot_product_attention`. All ranks of the group must call.
    """
    own, sizes = torch.cat((key, value), dim=-1), (key.shape[-1], value.shape[-1])
    whole = _Gather.apply(own, shard)
    if saves_tensors_by_hooks():  # activations are computed again, and the whole with them
        return _attend(query, whole, sizes, shard, window, options)
    again = _GatheredAgain(own.detach(), whole, shard)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return _attend(query, whole, sizes, shard, window, options)


def _attend(
    query: Tensor,
    whole: Tensor,
    sizes: tuple[int, int],
    shard: SequenceShard,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Return attention to the keys and values of `whole` [batch, heads, tokens, sum of sizes]."""
    key, value = whole.split(sizes, dim=-1)
    if shard.device != "cpu" and query.shape[1] != key.shape[1]:  # else all scores would exist
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    mixed = []
    for rows, mask in zip(query.chunk(2, dim=2), shard.mask_of(query, window), strict=True):
        end = mask.shape[-1]
        known = key[:, :, :end], value[:, :, :end]
        mixed.append(F.scaled_dot_product_attention(rows, *known, attn_mask=mask, **options))
    return torch.cat(mixed, dim=2)


class _GatheredAgain:
    """Hooks for saved tensors that keep a rank's own tokens in place of the gathered ones."""

    def __init__(self, own: Tensor, whole: Tensor, shard: SequenceShard) -> None:
        self.own, self.shard, self.storage = own, shard, storage_id(whole)
        self.whole: Tensor | None = None
        self.num_packed = self.num_left = 0

    def pack(self, tensor: Tensor) -> Any:
        if storage_id(tensor) != self.storage:
            return tensor
        self.num_packed += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.whole is None:
            self.whole, self.num_left = gathered(self.own, self.shard), self.num_packed
        found = self.whole.as_strided(*packed)
        self.num_left -= 1
        if not self.num_left:
            self.whole = None
        return found


def gathered(own: Tensor, shard: SequenceShard) -> Tensor:
    """Return all tokens, in their order, from the own tokens [batch, heads, own tokens, size]."""
    parts = own.new_empty(shard.size, *own.shape)
    shard.all_gather(parts.flatten(0, 1), own.contiguous())
    shard.count(parts)
    firsts, seconds = parts.chunk(2, dim=3)
    return torch.cat((*firsts, *seconds.flip(0)), dim=2)


class _Gather(torch.autograd.Function):
    """`gathered`; backward sums the gradients of the own tokens."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return gathered(own, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard: SequenceShard = ctx.shard
        firsts, seconds = torch.stack(grad.chunk(2 * shard.size, dim=2)).chunk(2)
        parts = torch.cat((firsts, seconds.flip(0)), dim=3)
        own = parts.new_empty(parts.shape[1:])
        shard.reduce_scatter(own, parts.flatten(0, 1))
        shard.count(parts)
        return own, None


def own_tokens(model: nn.Module, whole: Tensor) -> Tensor:
    """This rank's tokens of `whole` [batch, tokens, ...], of the samples of the last forward."""
    shard: SequenceShard | None = getattr(model, ATTRIBUTE, None)
    return whole if shard is None else shard.own(whole.movedim(1, -1)).movedim(-1, 1)


def whole_output(model: nn.Module, output: Any) -> Any:
    """What a forward of `model` returns for this rank's tokens, as it is for all tokens.

    Tensors [batch, own tokens, ...] become [batch, tokens, ...], and so do losses of each token,
    [batch * own tokens]; a pair (sum, count) is the sum of all ranks' pairs. A rank's gradient is
    that of its own part: all ranks compute the same loss of the whole, which counts on one of them.
    Raises `UsageError` for tensors of which the whole is not known. All ranks of the group must
    call. Where no sequences are divided it is `output` itself.
    """
    shard: SequenceShard | None = getattr(model, ATTRIBUTE, None)
    is_whole = shard is None or facts_of(model).gathers_outputs
    return output if shard is None or is_whole else _whole(output, shard)


def _whole(output: Any, shard: SequenceShard) -> Any:
    if isinstance(output, Tensor):
        if output.ndim < 2 or output.shape[1] != shard.length // shard.size:
            raise UsageError(
                f"mesh.cp={shard.size}: forward returned a tensor of shape {tuple(output.shape)}, "
                f"which has no {shard.length // shard.size} tokens of this rank as its dimension 1",
                "return [batch, own tokens, ...] or (sum, count), or set mesh.cp=1",
            )
        return _Whole.apply(output, shard)
    if isinstance(output, Mapping):
        found: Any = copy.copy(output)
        for name, value in output.items():
            found[name] = _whole(value, shard)
        return found
    if isinstance(output, tuple) and len(output) == 2 and _is_number(output[1]):
        return _whole_of_pair(*output, shard)
    if isinstance(output, list | tuple):
        values = [_whole(value, shard) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if output is None or isinstance(output, bool | str):
        return output
    raise UsageError(
        f"mesh.cp={shard.size}: forward returned a {type(output).__name__}, whose tensors are of a "
        "part of the tokens",
        "return tensors, a dict or a tuple of them, or set mesh.cp=1",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _whole_of_pair(loss: Any, count: Any, shard: SequenceShard) -> tuple[Tensor, Tensor]:
    """The whole of losses, or of their sum, and of how many there are."""
    loss = loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device=shard.device)
    count = torch.as_tensor(count, device=loss.device)
    total = _Sum.apply(count, shard)
    if loss.numel() == 1:
        return _Sum.apply(loss, shard), total
    if loss.ndim != 1:
        raise UsageError(
            f"mesh.cp={shard.size}: forward returned a pair with a tensor of shape "
            f"{tuple(loss.shape)}, which is neither a sum nor the losses of tokens",
            "return (sum, count), or set mesh.cp=1",
        )
    rows = loss.view(-1, shard.length // shard.size)
    return _Whole.apply(rows, shard).flatten(), total


class _Whole(torch.autograd.Function):
    """[batch, tokens, ...] of every rank's own tokens; backward returns the own ones' gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        whole = gathered(own.reshape(own.shape[0], 1, own.shape[1], -1), shard)
        return whole.view(own.shape[0], -1, *own.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        chunks, rank = grad.chunk(2 * ctx.shard.size, dim=1), ctx.shard.rank
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1), None


def of_first_rank(own: Tensor, shard: SequenceShard) -> Tensor:
    """What the first rank has, which holds the first token; backward gives it alone a gradient."""
    found: Tensor = _OfFirst.apply(own, shard)
    return found


class _OfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        parts = own.new_empty(shard.size, *own.shape)
        shard.all_gather(parts.flatten(0, 1), own.contiguous())
        shard.count(parts)
        return parts[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.shard.rank == 0 else torch.zeros_like(grad), None


class _Sum(torch.autograd.Function):
    """The sum of every rank's number, added in their order; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: SequenceShard) -> Tensor:
        parts = own.new_empty(shard.size)
        shard.all_gather(parts, own.reshape(1))
        shard.count(parts)
        return parts.sum().view(own.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
