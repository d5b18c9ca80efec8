"""What blocks compute again in backward: the same numbers, less memory, no costly operation."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colotrain.engine.model import blocks
from colotrain.engine.model.blocks import checkpoint_blocks_, compile_blocks_
from colotrain.errors import UsageError
from colotrain.models.loading import build_on_meta, build_whole
from colotrain.planner.traced.tracing import read, record, trace
from colotrain.spec.plan import RECOMPUTE, ModelPlan, Recompute
from colotrain.spec.survey import Trace
from colotrain.torch_internals import COMPUTED_AGAIN
from tests.traces import most_alive

WIDTH, SEQ_LEN = 16, 8
LLM_25M = ModelPlan(
    target="colotrain.models.llm:LLM",
    args={"vocab_size": 256, "d_model": 512, "num_layers": 8, "num_heads": 8},
)


class Block(nn.Module):
    """Attention and an MLP, with dropout in all the places where models have it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        x = x + F.dropout(self.output(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, block: Any = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.fixture
def seed() -> int:
    """Another one in each run of the tests; shown where one fails."""
    chosen = random.SystemRandom().randrange(2**31)
    print(f"seed {chosen}")
    return chosen


def trained(
    model: nn.Module, seed: int, recompute: Recompute, *, frozen: tuple[str, ...] = ()
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two micro-batches, and the sums of their gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    checkpoint_blocks_(model, recompute)
    torch.manual_seed(seed + 1)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(4, SEQ_LEN, WIDTH))
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def made(seed: int, *args: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Model(*args)


def assert_same(one: tuple[Any, dict[str, Tensor]], two: tuple[Any, dict[str, Tensor]]) -> None:
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, two[1][name]), name


FROZEN: list[tuple[str, ...]] = [
    (),
    ("blocks.0.",),
    ("blocks.0.", "blocks.1.qkv", "blocks.2.down.weight"),
    ("blocks.",),
]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("frozen", FROZEN)
def test_losses_and_gradients_are_bit_identical(
    seed: int, recompute: Recompute, dropout: float, frozen: tuple[str, ...]
) -> None:
    plain = trained(made(seed, dropout), seed, "none", frozen=frozen)
    assert any(gradient.abs().max() > 0 for gradient in plain[1].values())
    again = trained(made(seed, dropout), seed, recompute, frozen=frozen)
    assert_same(again, plain)


class Counting(TorchDispatchMode):
    """Names of the operations that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ran[func.name()] += 1
        return func(*args, **(kwargs or {}))


def ran(recompute: Recompute) -> Counter[str]:
    model = made(0)
    checkpoint_blocks_(model, recompute)
    with Counting() as counting:
        model(torch.randn(4, SEQ_LEN, WIDTH)).backward()
    return counting.ran


def test_nothing_costly_runs_again_and_everything_else_does() -> None:
    plain, selective, whole = (ran(recompute) for recompute in RECOMPUTE)
    products = ("aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu")
    assert [selective[name] for name in products] == [plain[name] for name in products]
    assert all(whole[name] > plain[name] for name in products[1:])
    for cheap in ("aten::gelu", "aten::native_layer_norm"):
        assert (plain[cheap], selective[cheap], whole[cheap]) == (3, 6, 6)


class Attend(torch.autograd.Function):
    """Stands for attention on a GPU, which draws random numbers where it drops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float) -> Tensor:
        out = torch.ops.colotrain_tests.attend(x, dropout)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].cos(), None


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = Attend.apply(self.before(x).tanh(), self.dropout)
        return x + self.after(F.dropout(mixed, 0.4).sin())


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often the kernel ran."""
    calls = []
    with torch.library._scoped_library("colotrain_tests", "DEF") as library:
        library.define(
            "attend(Tensor x, float dropout_p=0.) -> Tensor",
            tags=(torch.Tag.nondeterministic_seeded,),
        )

        def kernel(x: Tensor, dropout_p: float = 0.0) -> Tensor:
            calls.append(dropout_p)
            return x * (torch.rand(x.shape) > dropout_p) if dropout_p else x.clone()

        library.impl("attend", kernel, "CPU")
        monkeypatch.setattr(blocks, "COSTLY", blocks.COSTLY | {"colotrain_tests::attend"})
        yield calls


@pytest.mark.parametrize(("dropout", "runs"), [(0.0, 1), (0.5, 2)])
def test_what_draws_random_numbers_runs_again_so_that_those_after_it_are_the_same(
    seed: int, attend: list[float], dropout: float, runs: int
) -> None:
    plain = trained(made(seed, dropout, Attending), seed, "none")
    once = len(attend)
    again = trained(made(seed, dropout, Attending), seed, "selective")
    assert_same(again, plain)
    assert len(attend) == once + runs * once


class ChangesInPlace(nn.Module):
    def __init__(self, _: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).view(-1, WIDTH).relu_().view_as(x).sin())


class RecurrentBlock(nn.Module):
    """torch itself changes products of matrices in place here."""

    def __init__(self, _: float) -> None:
        super().__init__()
        self.inner, self.down = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x)[0])


@pytest.mark.parametrize("block", [ChangesInPlace, RecurrentBlock])
def test_what_is_changed_in_place_after_a_product_is_computed_again(
    seed: int, block: type[nn.Module]
) -> None:
    plain = trained(made(seed, 0.0, block), seed, "none")
    assert_same(trained(made(seed, 0.0, block), seed, "full"), plain)
    try:
        assert_same(trained(made(seed, 0.0, block), seed, "selective"), plain)
    except UsageError:  # refused, where torch does not let it be computed again
        assert COMPUTED_AGAIN is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("frozen", [(), ("blocks.0.", "blocks.1.qkv")])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_blocks_keep_and_compute_again_as_well(
    seed: int, dropout: float, frozen: tuple[str, ...]
) -> None:
    def compiled(recompute: Recompute) -> tuple[Any, dict[str, Tensor]]:
        torch._dynamo.reset()
        model = made(seed, dropout)
        checkpoint_blocks_(model, recompute)
        compile_blocks_(model)
        return trained(model, seed, "none", frozen=frozen)

    (plain, whole), (again, kept) = compiled("none"), compiled("selective")
    assert again == pytest.approx(plain, abs=1e-6)
    assert kept.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(kept[name], gradient, msg=name)


# Memory


def flops(found: Trace) -> float:
    return sum(s.work.matmul_flops + s.work.attention_flops for s in found.segments)


@functools.cache
def traced(recompute: Recompute, device: str) -> Trace:
    model = build_on_meta(LLM_25M)
    assert model is not None
    tokens = torch.empty(256, dtype=torch.int64, device="meta")
    sample = {"input_ids": tokens, "labels": tokens}
    precision = "fp32" if device == "cpu" else "bf16"
    options = {"precision": precision, "checkpointing": recompute, "device": device}
    return trace(model, sample, micro_batch=4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_traced_peak_of_llm_25m_is_between_the_others_and_no_product_is_counted_twice(
    device: str,
) -> None:
    plain, selective, whole = (traced(recompute, device) for recompute in RECOMPUTE)
    assert most_alive(whole) * 1.1 < most_alive(selective) < 0.9 * most_alive(plain)
    assert flops(selective) == flops(plain) < flops(whole)


def test_what_is_seen_without_storage_is_what_the_real_model_allocates() -> None:
    peaks = []
    for recompute in RECOMPUTE:
        model = build_whole(LLM_25M, seed=0)
        checkpoint_blocks_(model, recompute)
        tokens = torch.randint(0, 256, (4, 256))
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        peaks.append(most_alive(read(record(model, batch, device="cpu"), model, batch)))
        assert most_alive(traced(recompute, "cpu")) == pytest.approx(peaks[-1], rel=0.02)
    assert peaks == sorted(peaks, reverse=True)
