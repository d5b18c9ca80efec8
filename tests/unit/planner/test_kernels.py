"""A model traced for CUDA saves, moves and counts what CUDA's kernels do, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models.llm import LLM
from colotrain.planner.traced.kernels import kernels_of
from colotrain.planner.traced.tracing import trace
from colotrain.spec.survey import Trace

ROWS, WIDTH, HEADS = 6, 64, 4


class Single(nn.Module):
    """One operation, and a loss of its result."""

    def __init__(self, act: Callable[..., Tensor], weights: torch.dtype) -> None:
        super().__init__()
        self.act, self.weight = act, nn.Parameter(torch.ones(WIDTH, dtype=weights, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x.requires_grad_(), self.weight).sum()


def traced(model: nn.Module, device: str, **sample: Tensor) -> Trace:
    return trace(
        model, sample, precision="fp32", checkpointing="none", device=device, micro_batch=2
    )


def num_ops(found: Trace) -> int:
    return sum(segment.work.num_ops for segment in found.segments)


def kept_bytes(found: Trace) -> int:
    """Bytes that are alive when forward ends."""
    events = [e for s in found.segments if s.phase == "forward" for e in s.events]
    alive = {e for e in events if e >= 0} - {-1 - e for e in events if e < 0}
    return sum(found.storages[number] for number in alive)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight)


def drop(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x, 0.1) * weight


def rows(dtype: torch.dtype) -> Tensor:
    return torch.empty(ROWS, WIDTH, dtype=dtype, device="meta")


def test_rmsnorm_is_one_kernel_each_way_on_cuda_and_saves_one_factor_per_row() -> None:
    on_cuda = traced(Single(norm, torch.float32), "cuda", x=rows(torch.float32))
    on_cpu = traced(Single(norm, torch.float32), "cpu", x=rows(torch.float32))
    around = num_ops(traced(Single(torch.mul, torch.float32), "cuda", x=rows(torch.float32)))
    assert num_ops(on_cuda) <= around + 1 < num_ops(on_cpu)
    elements, one = 2 * ROWS * WIDTH, 2 * ROWS
    assert kept_bytes(on_cuda) == 4 * one + 4  # the sum is the loss; the input is the batch's
    moved = sum(segment.work.moved_bytes for segment in on_cuda.segments)
    forward = 4 * (2 * elements + one + WIDTH)
    backward = 4 * (3 * elements + one + 2 * WIDTH)
    assert moved == pytest.approx(forward + backward, abs=4 * elements + 100)  # and the sum's


def test_rmsnorm_is_taken_apart_on_cuda_too_where_its_weight_has_another_dtype() -> None:
    fused = traced(Single(norm, torch.bfloat16), "cuda", x=rows(torch.bfloat16))
    mixed = traced(Single(norm, torch.float32), "cuda", x=rows(torch.bfloat16))
    assert num_ops(mixed) > num_ops(fused) + 10


def test_the_mask_of_dropout_has_one_byte_per_element_on_cuda() -> None:
    on_cuda = traced(Single(drop, torch.float32), "cuda", x=rows(torch.float32))
    on_cpu = traced(Single(drop, torch.float32), "cpu", x=rows(torch.float32))
    elements = 2 * ROWS * WIDTH
    assert kept_bytes(on_cpu) - kept_bytes(on_cuda) == 3 * elements


def test_attention_inside_torch_s_own_modules_is_cuda_s_kernel() -> None:
    """`nn.MultiheadAttention` calls it from within a function of torch."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].float().sum()

    def scores(length: int) -> int:
        x = torch.empty(length, WIDTH, device="meta")
        return kept_bytes(
            trace(
                Attending().to("meta"),
                {"x": x},
                precision="bf16",
                checkpointing="none",
                device="cuda",
                micro_batch=1,
            )
        )

    assert scores(2048) < 2.1 * scores(1024), "no matrix of all pairs is kept"


def test_a_block_keeps_on_cuda_what_is_counted_by_hand() -> None:
    length, kv_heads, hidden = 128, 2, 192

    def kept(num_layers: int) -> int:
        sizes = {"vocab_size": 96, "d_model": WIDTH, "num_layers": num_layers, "d_hidden": hidden}
        model = LLM(**sizes, num_heads=HEADS, num_kv_heads=kv_heads, tie_embeddings=True)
        tokens = torch.empty(length, dtype=torch.int64, device="meta")
        sample = {"input_ids": tokens, "labels": tokens}
        found = trace(
            model.to("meta"),
            sample,
            precision="bf16",
            checkpointing="none",
            device="cuda",
            micro_batch=2,
        )
        return kept_bytes(found)

    tokens = 2 * length
    residuals, norms = 2 * WIDTH, 2 * WIDTH
    mixed = 2 * WIDTH  # as the kernel has it, and a copy with the heads of a token side by side
    heads = WIDTH + 2 * WIDTH * kv_heads // HEADS  # queries, keys, values
    feed_forward = 4 * hidden  # gate, SiLU of it, up, their product
    in_bf16 = 2 * (residuals + norms + heads + mixed + feed_forward)
    in_fp32 = 4 * (2 + HEADS)  # a factor of each norm, logsumexp of each head
    assert kept(3) - kept(2) == pytest.approx(tokens * (in_bf16 + in_fp32), abs=64)


def test_nothing_stays_of_a_trace() -> None:
    x = torch.empty(2, WIDTH, device="meta", requires_grad=True)
    with kernels_of("cuda"):
        assert "RMSNorm" in str(F.rms_norm(x, (WIDTH,)).grad_fn)
    assert "RMSNorm" not in str(F.rms_norm(x, (WIDTH,)).grad_fn)
