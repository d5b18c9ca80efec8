"""The chunked cross-entropy is torch's, in value and gradients, with only a chunk of logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colotrain.models import loss
from colotrain.models.loss import Head, cross_entropy
from colotrain.planner.traced.tracing import Recording
from colotrain.torch_internals import TorchDispatchMode

ROWS, WIDTH, VOCAB = 37, 16, 101


def case(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < 0.3] = -100
    return x, weight, labels


def exact(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own, in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    total = F.cross_entropy(x @ weight.T, labels, ignore_index=-100, reduction="sum")
    (total / 7).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return total.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk", [VOCAB, 5 * VOCAB, 1000 * VOCAB])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
)
def test_value_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, chunk: int
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(loss, "LEAST_ROWS", 0)
    x, weight, labels = case(dtype, seed=chunk)
    total = cross_entropy(x, weight, labels)
    (total / 7).backward()
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for found, right in zip((total, x.grad, weight.grad), exact(x, weight, labels), strict=True):
        assert found is not None
        scale = right.abs().max().item()
        assert (found.double() - right).abs().max().item() <= tolerance * scale
    assert x.grad is not None
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("chunk", [5 * VOCAB, 1000 * VOCAB])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_the_loss_of_each_token_and_its_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, chunk: int
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(loss, "LEAST_ROWS", 0)
    x, weight, labels = case(dtype, seed=chunk + 1)
    scales = torch.randn(ROWS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    shape = loss.Logits(scale=0.5, cap=4.0)
    bias = weight.detach()[:, 0].clone().requires_grad_()
    with loss.by_token():
        each = cross_entropy(x, weight, labels, bias=bias, logits=shape)
    (each * scales).sum().backward()
    own = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    logits = 4.0 * torch.tanh((own[0] @ own[1].T + own[2]) * 0.5 / 4.0)
    right = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    (right * scales).sum().backward()
    assert each.shape == (ROWS,)
    found = (each, x.grad, weight.grad, bias.grad)
    for one, wanted in zip(found, (right, *(t.grad for t in own)), strict=True):
        assert one is not None
        assert wanted is not None
        off = (one.detach().double() - wanted.detach()).abs().max().item()
        assert off <= tolerance * wanted.abs().max().item()


def test_rows_without_a_target_have_no_part_in_it() -> None:
    x, weight, labels = case(torch.float32)
    cross_entropy(x, weight, labels).backward()
    assert x.grad is not None
    assert not x.grad[labels == -100].any()
    nothing = cross_entropy(x, weight, torch.full_like(labels, -100))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient(frozen: int) -> None:
    tensors = case(torch.float32)
    tensors[frozen].requires_grad_(False)
    cross_entropy(*tensors).backward()
    assert tensors[frozen].grad is None
    assert tensors[1 - frozen].grad is not None


def test_nothing_is_kept_for_a_backward_that_never_comes() -> None:
    head = Head(WIDTH, VOCAB, bias=False)
    x, _, labels = case(torch.float32)
    with torch.no_grad():
        value = head(x, labels)
    assert not value.requires_grad
    torch.testing.assert_close(value, head(x, labels).detach())


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels = case(torch.float32)
    total = cross_entropy(x * 1e4, weight, labels)
    right = F.cross_entropy(x * 1e4 @ weight.T, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total, right)


def test_only_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of the loss is far smaller than all logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                Largest.numel = max(Largest.numel, out.untyped_storage().nbytes() // 4)
            return out

    monkeypatch.setattr(loss, "CHUNK_LOGITS", VOCAB)
    assert loss.rows_at_once(torch.empty(VOCAB, WIDTH)) == 4  # a quarter of the width
    x, weight, labels = case(torch.float32)
    with Largest():
        cross_entropy(x, weight, labels).backward()
    assert Largest.numel <= max(4 * VOCAB, weight.numel(), x.numel())


@pytest.mark.parametrize("by_token", [False, True])
def test_a_chunk_is_freed_before_the_next_one_exists(by_token: bool) -> None:
    rows, width, vocab = 64, 4, 2**20  # chunks of four rows, 16 MiB each
    x = torch.empty(rows, width, device="meta", requires_grad=True)
    weight = torch.empty(vocab, width, device="meta")
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    with loss.computing_as("cpu"):
        chunk_bytes = loss.rows_at_once(weight) * vocab * 4
    recording = Recording([x, weight, labels], repeated=0.0)
    with recording, loss.computing_as("cpu"), loss.by_token() if by_token else nullcontext():
        cross_entropy(x, weight, labels).sum().backward()
    sizes, now, most = recording.storages.sizes, 0, 0
    for number, sign in (change for s in recording.stretches for change in s.changes):
        now += sign * sizes[number]
        most = max(most, now)
    assert chunk_bytes <= most < 1.1 * chunk_bytes


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 32), ("cuda", 2)])
def test_a_gpu_takes_two_thousand_rows_at_once_also_in_a_plan(device: str, chunks: int) -> None:
    x = torch.empty(4096, 8, device="meta", requires_grad=True)
    labels = torch.empty(4096, dtype=torch.int64, device="meta")
    weight = torch.empty(32768, 8, device="meta")
    seen: list[int] = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.exp_.default:
                seen.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Counts(), loss.computing_as(device):
        cross_entropy(x, weight, labels)
    assert seen == [4096 // chunks] * chunks


def test_few_operations_read_and_write_all_logits() -> None:
    """Beside the products: a cast, the log-probabilities, the gradient, and ignored rows."""
    rows, vocab = 2048, 32768
    x = torch.empty(rows, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    weight = torch.empty(vocab, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    counted: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape == (rows, vocab):
                counted.append(func.__name__.split(".")[0])
            return out

    with Names(), loss.computing_as("cuda"):
        cross_entropy(x, weight, labels).backward()
    some = {"scatter_", "t", "mm"}  # one logit of a row; a view; the products
    wanted = ["_to_copy", "log_softmax", "exp", "masked_fill_"]
    assert [name for name in counted if name not in some] == wanted


def test_a_gradient_is_exact_where_a_token_is_almost_certain() -> None:
    """p - 1 of a p that bfloat16 would round to 1."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    cross_entropy(x, weight, torch.tensor([0])).backward()
    p = torch.tensor([8.0, 0.0], dtype=torch.float64).softmax(0)
    assert x.grad is not None
    assert x.grad[0, 0].item() == pytest.approx((8.0 * (p[0] - 1.0)).item(), rel=0.01)
