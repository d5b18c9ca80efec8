"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Sources: RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020),
grouped-query attention (Ainslie et al. 2023), residual-scaled initialisation (GPT-2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models.context_parallel import SequenceShard, attend
from colotrain.models.documents import Documents, attend_within, documents_in
from colotrain.models.loss import Head
from colotrain.models.tensor_parallel import (
    TensorShard,
    VocabularyEmbedding,
    enter,
    gather_head,
    leave,
    vocabulary_cross_entropy,
    vocabulary_logits,
)
from colotrain.spec.divisions import Divisions
from colotrain.spec.objectives import IGNORE_INDEX

INIT_STD = 0.02
MOST_LAYERS = 10_000


class LLM(nn.Module):
    """Decoder-only language model.

    Args:
        vocab_size: rows of the embedding.
        d_model: width of the residual stream.
        num_layers: decoder blocks.
        num_heads: query heads; `d_model / num_heads` is the head size and must be even.
        num_kv_heads: key and value heads; must divide `num_heads` (default: equal to it).
        d_hidden: width inside the SwiGLU (default: 8/3 of d_model, rounded up to 64).
        tie_embeddings: the output head uses the embedding's matrix.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
    """

    sequence_shard: SequenceShard | None = None
    """The part of each sequence that this rank computes; None: all of it."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        d_hidden: int | None = None,
        tie_embeddings: bool = False,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        d_hidden = d_hidden or 64 * math.ceil(8 * d_model / 3 / 64)
        sizes = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "d_hidden": d_hidden,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be 1 or more")
        if num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers={num_layers} must be {MOST_LAYERS} or less")
        if d_model % (2 * num_heads) or num_heads % num_kv_heads:
            raise ValueError(
                f"d_model={d_model} must be an even multiple of num_heads={num_heads}, "
                f"and num_heads of num_kv_heads={num_kv_heads}"
            )
        self.vocab_size, self.d_model, self.num_layers = vocab_size, d_model, num_layers
        self.head_dim, self.rope_theta = d_model // num_heads, rope_theta
        self.embed = VocabularyEmbedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, num_kv_heads, d_hidden, norm_eps) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.head = VocabularyHead(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor | tuple:
        """Logits [batch, seq, vocab], or with `labels` the pair (summed loss, number of targets).

        All arguments are int64 [batch, seq]; `labels[:, t]` is the token after `input_ids[:, t]`,
        and -100 is no target. Tokens attend to earlier tokens with the same `document_ids`.
        A document is contiguous, and its positions begin at 0. With `sequence_shard` the output is
        that of this rank's tokens.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        if document_ids is not None:
            positions = positions_within(document_ids)
        if self.sequence_shard is not None:
            shard = self.sequence_shard
            shard.begin(input_ids.shape[1], document_ids)
            input_ids, positions = shard.own(input_ids), shard.own(positions)
            labels = None if labels is None else shard.own(labels)
        x = self.embed(input_ids)
        documents = None
        if document_ids is not None and self.sequence_shard is None:
            documents = documents_in(document_ids)
        rope = rotary_tables(positions, self.head_dim, self.rope_theta, x)
        for block in self.blocks:
            x = block(x, *rope, documents)
        output: Tensor = self.head(self.norm(x), labels)
        return output if labels is None else (output, (labels != IGNORE_INDEX).sum())

    def init_weights(self) -> None:
        """Draw normal weights (σ 0.02), those of residual outputs divided by √(2 · layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attention.output", "mlp.down"))
                scale = math.sqrt(2 * self.num_layers) if residual else 1.0
                nn.init.normal_(module.weight, std=INIT_STD / scale)

    def divisions(self) -> Divisions:
        """Return how ranks can divide the model by heads, hidden units and vocabulary."""
        first: Block = self.blocks[0]  # type: ignore[assignment]
        attention = first.attention
        rows = ("embed", "head", *("blocks.*.attention." + n for n in ("query", "key", "value")))
        columns = ("blocks.*.attention.output", "blocks.*.mlp.down")
        return Divisions(
            dims={
                **{f"{name}.weight": 0 for name in (*rows, "blocks.*.mlp.gate", "blocks.*.mlp.up")},
                **{f"{name}.weight": 1 for name in columns},
            },
            sizes={
                "num_heads": attention.num_heads,
                "num_kv_heads × head size": attention.num_kv_heads * attention.head_dim,
                "d_hidden": first.mlp.down.in_features,
                "vocab_size": self.vocab_size,
            },
            num_kv_heads=attention.num_kv_heads,
            divides_tokens=True,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a token's forward and backward: 6 per matrix weight plus 12 · L · d · seq.

        The second term is attention's, with no discount for the causal mask. Source: appendix B of
        PaLM (Chowdhery et al. 2022).
        """
        layers = [m for m in self.modules() if isinstance(m, nn.Linear)]
        matrices = sum(m.in_features * m.out_features for m in layers)
        return 6.0 * matrices + 12.0 * self.num_layers * self.d_model * seq_len


class Block(nn.Module):
    """Attention and SwiGLU, each on a normalised input, each added to the residual stream."""

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int, d_hidden: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = Attention(d_model, num_heads, num_kv_heads)
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = SwiGLU(d_model, d_hidden)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    sequence_shard: SequenceShard | None = None
    tensor_shard: TensorShard | None = None

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        d_kv = num_kv_heads * self.head_dim
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_kv, bias=False)
        self.value = nn.Linear(d_model, d_kv, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Without `documents` each sample is one."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        shard = self.tensor_shard
        x = enter(x, shard)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if shard is not None and self.num_kv_heads < shard.size:
            key, value = (gather_head(own, self.num_kv_heads, shard) for own in (key, value))
        query, key, value = (
            rotate(heads(query), cos, sin),
            rotate(heads(key), cos, sin),
            heads(value),
        )
        options: dict[str, Any] = {"enable_gqa": key.shape[1] != query.shape[1]}
        if self.sequence_shard is not None:
            mixed = attend(query, key, value, self.sequence_shard, **options)
        elif documents is not None:
            mixed = attend_within(query, key, value, documents, **options)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        return leave(self.output(mixed.transpose(1, 2).flatten(2)), shard)


class SwiGLU(nn.Module):
    tensor_shard: TensorShard | None = None

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_hidden, bias=False)
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.tensor_shard)
        return leave(self.down(F.silu(self.gate(x)) * self.up(x)), self.tensor_shard)


class VocabularyHead(Head):
    """A head of which a rank may compute the logits of a part of the vocabulary."""

    tensor_shard: TensorShard | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [..., vocab] of `x` [..., d]; with `labels` [...] (-100: none) a scalar.

        With sequence parallelism `x` has this rank's tokens, the logits and labels all of them.
        """
        shard = self.tensor_shard
        if shard is None:
            return super().forward(x, labels)
        if labels is None:
            return vocabulary_logits(x, self.weight, shard)
        return vocabulary_cross_entropy(x, self.weight, labels, shard)


def positions_within(document_ids: Tensor) -> Tensor:
    """Distance of each token of [batch, seq] from the beginning of its document."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.cummax(torch.where(begins, index, 0), dim=1).values


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines in the device and dtype of `like`.

    [seq, head_dim / 2] for positions [seq], [batch, 1, seq, head_dim / 2] for [batch, seq].
    """
    channels = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * theta ** (-channels / head_dim)
    if positions.ndim > 1:
        angles = angles.unsqueeze(1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + half]) of [batch, heads, seq, head_dim] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
