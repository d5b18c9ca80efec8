"""Tensor parallelism: the ranks of a group divide the matrices of every layer among themselves.

All ranks of a group have the same tokens. A rank computes some of the attention heads, some of the
hidden units of each MLP and the logits of a part of the vocabulary, so that it needs only a part of
each matrix (Megatron-LM, Shoeybi et al. 2019). `enter` and `leave` stand around each such part of a
layer: the sum of all ranks' outputs is the output, and that of their gradients the gradient.
Everything between the parts is the same on all ranks; or, with sequence parallelism (Korthikanti
et al. 2022), each rank has it for its own tokens alone, `enter` gathers them, and `leave` returns
the sum of this rank's tokens. Parameters between the parts then have a part of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colotrain import module_tree
from colotrain.errors import UsageError
from colotrain.models.context_parallel import Collective, without_sending
from colotrain.models.loss import (
    PRODUCTS,
    Logits,
    computed_by,
    each_in_chunks,
    exact_dtype,
    in_chunks,
    is_by_token,
    shape_,
)
from colotrain.spec.divisions import Divisions, Split
from colotrain.spec.objectives import IGNORE_INDEX

ATTRIBUTE = "tensor_shard"
"""Attribute of modules that compute a part of their output where it is not None."""
DIVISIONS = "divisions"
"""Method of a model that returns its `Divisions`."""


@dataclass(slots=True, eq=False, kw_only=True)
class TensorShard:
    """One rank of a tensor-parallel group. All ranks must make the same calls."""

    rank: int
    size: int
    """Ranks of the group."""
    by_tokens: bool = False
    """Whether ranks divide tokens among themselves between the parts of layers."""
    all_gather: Collective = without_sending
    """Sets [size * n, ...] to [n, ...] of every rank, in their order."""
    reduce_scatter: Collective = without_sending
    """Sets [n, ...] to this rank's part of the sum of all ranks' [size * n, ...]."""
    calls: int = 0
    """Number of collectives so far."""
    exchanged_bytes: int = 0
    """Bytes of what they gathered and summed; a sum gathers the same bytes again."""

    def gather(self, own: Tensor) -> Tensor:
        """Return [size, ...]: the tensor of every rank of the group."""
        parts = own.new_empty(self.size * own.numel())
        self.all_gather(parts, own.contiguous().view(-1))
        self._count(parts)
        return parts.view(self.size, *own.shape)

    def scatter(self, parts: Tensor) -> Tensor:
        """Return this rank's part [...] of the sum of all ranks' `parts` [size, ...]."""
        own = parts.new_empty(parts.shape[1:])
        self.reduce_scatter(own.view(-1), parts.contiguous().view(-1))
        self._count(parts)
        return own

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group: the same bits on every rank, added in their order."""
        flat = tensor.detach().reshape(-1)
        short = -flat.numel() % self.size
        padded = F.pad(flat, (0, short)) if short else flat
        whole = self.gather(self.scatter(padded.view(self.size, -1))).view(-1)
        return whole[: flat.numel()].view(tensor.shape)

    def by_rank(self, whole: Tensor) -> Tensor:
        """Return [..., size * n, d] as [size, ..., n, d], a view with the tokens of each rank.

        Raises `UsageError` where they cannot be divided.
        """
        if whole.shape[-2] % self.size:
            raise UsageError(
                f"mesh.sequence_parallel: {whole.shape[-2]} tokens cannot be divided among "
                f"mesh.tp={self.size} ranks",
                f"pad samples to a multiple of {self.size} tokens, or set it to false",
            )
        return whole.unflatten(-2, (self.size, -1)).movedim(-3, 0)

    def gather_tokens(self, own: Tensor) -> Tensor:
        """Return [..., size * n, d] from the [..., n, d] of every rank."""
        return self.gather(own).movedim(0, -3).flatten(-3, -2)

    def _count(self, whole: Tensor) -> None:
        self.calls += 1
        self.exchanged_bytes += whole.nbytes


def divide_parameters_(
    model: nn.Module, divisions: Divisions, shard: TensorShard
) -> dict[str, Split]:
    """Replace parameters by the part that `shard` holds; returns name → part, tied ones once.

    Modules with `tensor_shard` are told about it.
    """
    found: dict[str, Split] = {}
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in module_tree.named_modules(model):
        if hasattr(module, ATTRIBUTE):
            setattr(module, ATTRIBUTE, shard)
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is None:
                continue
            if parameter not in parts:
                split = divisions.split(name, parameter.shape, rank=shard.rank, ranks=shard.size)
                if split is None:
                    continue
                found[name] = split
                own = part_of(parameter.detach(), split).clone()
                parts[parameter] = nn.Parameter(own, parameter.requires_grad)
            module._parameters[key] = parts[parameter]
    return found


def part_of(whole: Tensor, split: Split) -> Tensor:
    """Return a view of the part of `whole` that `split` describes."""
    return whole.narrow(split.dim, split.start, split.size)


def enter(x: Tensor, shard: TensorShard | None) -> Tensor:
    """Return `x`, the same on all ranks, as the input of parts whose gradients are summed.

    With `by_tokens`, `x` [..., n, d] has this rank's tokens, and the result those of all ranks.
    """
    if shard is not None and shard.by_tokens:
        return _GatherTokens.apply(x, shard)
    return with_summed_gradient(x, shard)


def leave(x: Tensor, shard: TensorShard | None) -> Tensor:
    """Return the sum of all ranks' `x`, whose gradient is the same on all ranks.

    With `by_tokens`, return this rank's tokens of the sum.
    """
    if shard is not None and shard.by_tokens:
        return _ScatterTokens.apply(x, shard)
    return summed(x, shard)


def with_summed_gradient(x: Tensor, shard: TensorShard | None) -> Tensor:
    """Return `x`, the same on all ranks, of whose gradient each rank has a part."""
    return x if shard is None else _Enter.apply(x, shard)


def summed(x: Tensor, shard: TensorShard | None) -> Tensor:
    """Return the sum of all ranks' `x`, of all tokens."""
    return x if shard is None else _Leave.apply(x, shard)


def own_tokens(whole: Tensor, shard: TensorShard) -> Tensor:
    """Return this rank's tokens of `whole` [..., tokens, d], which is the same on all ranks."""
    own: Tensor = _OwnTokens.apply(whole, shard)
    return own


class _Enter(torch.autograd.Function):
    """The identity; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: TensorShard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum(grad), None


class _Leave(torch.autograd.Function):
    """The sum of all ranks; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: TensorShard) -> Tensor:
        return shard.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    """The tokens of all ranks; backward sums the gradients of this rank's."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: TensorShard) -> Tensor:
        ctx.shard = shard
        return shard.gather_tokens(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.scatter(ctx.shard.by_rank(grad)), None


class _ScatterTokens(torch.autograd.Function):
    """This rank's tokens of the sum of all ranks; backward gathers the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: TensorShard) -> Tensor:
        ctx.shard = shard
        return shard.scatter(shard.by_rank(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.gather_tokens(grad), None


class _OwnTokens(torch.autograd.Function):
    """This rank's tokens of what all ranks have alike; backward gathers those of all."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: TensorShard) -> Tensor:
        ctx.shard = shard
        return shard.by_rank(whole)[shard.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.gather_tokens(grad), None


class _GatherLast(torch.autograd.Function):
    """[..., size * n] from every rank's [..., n]; `alike`: all ranks use the result alike."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: TensorShard, alike: bool) -> Tensor:
        ctx.shard, ctx.alike = shard, alike
        return shard.gather(own).movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard: TensorShard = ctx.shard
        parts = grad.unflatten(-1, (shard.size, -1)).movedim(-2, 0)
        return parts[shard.rank] if ctx.alike else shard.scatter(parts), None, None


def gather_last(own: Tensor, shard: TensorShard, *, alike: bool) -> Tensor:
    """Return [..., size * n] from every rank's [..., n]; `alike`: all ranks use it alike."""
    whole: Tensor = _GatherLast.apply(own, shard, alike)
    return whole


def own_part(whole: Tensor, shard: TensorShard) -> Tensor:
    """Return this rank's [..., n] of [..., size * n], which is the same on all ranks."""
    part: Tensor = _OwnPart.apply(whole, shard)
    return part


class _OwnPart(torch.autograd.Function):
    """A part of what all ranks have alike; backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: TensorShard) -> Tensor:
        ctx.shard = shard
        return whole.chunk(shard.size, dim=-1)[shard.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.gather(grad).movedim(0, -2).flatten(-2), None


def gather_head(own: Tensor, num_heads: int, shard: TensorShard) -> Tensor:
    """Return the head [..., head size] that this rank's queries use.

    There are fewer key and value heads than ranks, and each rank has computed [..., n], an equal
    part of all heads. All ranks must call.
    """
    whole = gather_last(own, shard, alike=False).unflatten(-1, (num_heads, -1))
    return whole[..., shard.rank * num_heads // shard.size, :]


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which a rank may hold the rows of a part of the vocabulary."""

    tensor_shard: TensorShard | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        shard = self.tensor_shard
        return super().forward(input_ids) if shard is None else embed(self, shard, input_ids)


def embed(
    module: nn.Embedding,
    shard: TensorShard,
    input_ids: Tensor,
    *,
    out: Callable[[Tensor, TensorShard], Tensor] = leave,
) -> Tensor:
    """Return the rows of `input_ids`, where `module` has those of this rank's part.

    `out`, `leave` or `summed`, returns the sum of what all ranks have.
    """
    rows = module.weight.shape[0]
    index, is_here = _in_part(input_ids, rows, shard)
    padding = None
    if module.padding_idx is not None and module.padding_idx // rows == shard.rank:
        padding = module.padding_idx % rows  # a row without a gradient
    own = F.embedding(index, module.weight, padding)
    return out(own.masked_fill(~is_here.unsqueeze(-1), 0.0), shard)


def _in_part(tokens: Tensor, rows: int, shard: TensorShard) -> tuple[Tensor, Tensor]:
    """Return which of this rank's `rows` each token is, 0 for others, and whether it is one."""
    index = tokens - shard.rank * rows
    is_here = (index >= 0) & (index < rows)
    return index.where(is_here, 0), is_here


def vocabulary_logits(
    x: Tensor, weight: Tensor, shard: TensorShard, *, bias: Tensor | None = None
) -> Tensor:
    """Logits [..., vocab] of `x` [..., d] that `enter` takes; they are the same on all ranks."""
    return gather_last(F.linear(enter(x, shard), weight, bias), shard, alike=True)


def vocabulary_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: TensorShard,
    *,
    bias: Tensor | None = None,
    logits: Logits = PRODUCTS,
) -> Tensor:
    """`loss.cross_entropy` of `x` [..., d] that `enter` takes and `labels` of all tokens.

    `weight` [vocab / ranks, d] is this rank's part of the vocabulary. The result is the same on all
    ranks. They exchange three numbers per row in forward, within `by_token` again in backward, and
    the gradient of `x`; no rank computes the logits of another's part.
    """
    part: dict[str, Any] = {"rows": weight.shape[0], "shard": shard, "shape": logits}
    rows, chunk = enter(x, shard).flatten(0, -2), functools.partial(_chunk, **part)
    if (compute := computed_by()) is not None:
        own = VocabularyPart(weight.shape[0], shard)
        return compute(rows, weight, bias, labels.flatten(), logits, own)
    if is_by_token():
        losses_of = functools.partial(_losses, **part)
        return each_in_chunks(rows, weight, bias, labels.flatten(), losses_of, chunk)
    return in_chunks(rows, weight, bias, labels.flatten(), chunk)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The `loss.Vocabulary` of one rank."""

    num_rows: int
    """Tokens of the part."""
    shard: TensorShard

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        index, is_here = _in_part(tokens, self.num_rows, self.shard)
        return self.shard.sum(values.gather(1, index).where(is_here, 0.0))

    def put_(self, values: Tensor, tokens: Tensor, given: Tensor) -> Tensor:
        index, is_here = _in_part(tokens, self.num_rows, self.shard)
        # tokens of other parts add 0 to the first, whose value may not be written by two
        values.scatter_add_(1, index, -values.gather(1, index).where(is_here, 0.0))
        return values.scatter_add_(1, index, given.where(is_here, 0.0))

    def sum(self, values: Tensor) -> Tensor:
        return self.shard.sum(values.sum(1))

    def log_softmax(self, logits: Tensor) -> Tensor:
        top = self.shard.gather(logits.amax(1)).amax(0).unsqueeze(1)
        found = logits - top
        return found.sub_(self.sum(found.exp()).log_().unsqueeze(1))


def _losses(
    products: Tensor, labels: Tensor, *, rows: int, shard: TensorShard, shape: Logits
) -> Tensor:
    """Losses of some rows in float64; `rows`: this rank's part of the vocabulary."""
    logits, _ = shape_(products.to(exact_dtype(products)), shape)
    index, is_here = _in_part(labels, rows, shard)
    picked = logits.gather(1, index.unsqueeze(1)).squeeze(1).where(is_here, 0.0).double()
    top = shard.gather(logits.amax(1)).amax(0)
    logits -= top.unsqueeze(1)
    sums, picked = shard.sum(torch.stack((logits.exp_().sum(1).double(), picked)))
    return (sums.log() + (top.double() - picked)) * (labels != IGNORE_INDEX)


def _chunk(
    products: Tensor, labels: Tensor, *, rows: int, shard: TensorShard, shape: Logits
) -> tuple[Tensor, Tensor]:
    """Losses, and their gradients with respect to the products; `rows`: this rank's part."""
    logits, damping = shape_(products.to(exact_dtype(products)), shape)
    valid = labels != IGNORE_INDEX
    index, is_here = _in_part(labels, rows, shard)
    index, is_here = index.unsqueeze(1), is_here & valid
    logits -= shard.gather(logits.amax(1)).amax(0).unsqueeze(1)
    picked = logits.gather(1, index).squeeze(1).where(is_here, 0.0)
    sums, picked = shard.sum(torch.stack((logits.exp_().sum(1), picked)))
    losses = (sums.log() - picked) * valid
    slope = logits.div_(sums.unsqueeze(1))
    slope.scatter_add_(1, index, -is_here.unsqueeze(1).to(slope.dtype))
    slope *= valid.unsqueeze(1)
    if damping is not None:
        slope *= damping
    return losses, slope if shape.scale == 1.0 else slope.mul_(shape.scale)
