"""One kernel for all documents: where it is taken, what is kept of it, and what a plan counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.models import documents
from colotrain.models.documents import has_kernel_for_all
from colotrain.models.llm import LLM
from colotrain.models.loss import computing_as
from colotrain.planner.traced.tracing import trace
from colotrain.spec.plan import Recompute
from tests import varlen_on_cpu

SIZES = {"vocab_size": 50, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
RECOMPUTED: dict[Recompute, int] = {"none": 1, "selective": 1, "full": 2}
"""How often a layer's attention is computed."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each document that the kernel was called with; it is taken wherever it can be."""
    varlen_on_cpu.register()
    seen: list[int] = []
    attend = varlen_on_cpu._of_one

    def noting(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(query))
        return attend(query, *args)

    monkeypatch.setattr(varlen_on_cpu, "_of_one", noting)
    monkeypatch.setattr(documents, "has_kernel_for_all", lambda *_: True)
    return seen


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "dropout", "taken"),
    [
        ("cuda", BF16, (128, 128), 0.0, True),
        ("cuda", FP16, (80, 80), 0.0, True),
        ("cuda", BF16, (256, 256), 0.0, True),
        ("cuda", FP32, (128, 128), 0.0, False),
        ("cuda", BF16, (264, 264), 0.0, False),
        ("cuda", BF16, (84, 84), 0.0, False),
        ("cuda", BF16, (192, 128), 0.0, False),  # DeepSeek's
        ("cuda", BF16, (128, 128), 0.1, False),
        ("cpu", BF16, (128, 128), 0.0, False),
    ],
)
def test_it_is_taken_where_flash_attention_has_a_kernel(
    device: str, dtype: torch.dtype, sizes: tuple[int, int], dropout: float, taken: bool
) -> None:
    query, value = (torch.empty(2, 4, 16, n, dtype=dtype, device="meta") for n in sizes)
    with computing_as(device):
        assert has_kernel_for_all(query, query, value, dropout) == taken
    if device == "cpu":
        real = torch.empty(query.shape, dtype=dtype)
        assert not has_kernel_for_all(real, real, real)


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_gradients_are_those_of_documents_one_by_one(
    recompute: Recompute, kernel_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = LLM(**SIZES).double()
    model.init_weights()
    ids = torch.randint(0, 50, (2, 24))
    numbers = torch.zeros_like(ids)
    numbers[0, [1, 2, 9]] = numbers[1, 23] = 1
    lengths = [1, 1, 7, 15, 23, 1]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(ids, ids, numbers.cumsum(1))[0], [*model.parameters()])

    with monkeypatch.context() as patch:
        patch.setattr(documents, "has_kernel_for_all", lambda *_: False)
        wanted = gradients()
    assert kernel_calls == []
    checkpoint_blocks_(model, recompute)
    torch.testing.assert_close(gradients(), wanted, rtol=1e-10, atol=1e-12)
    assert kernel_calls == lengths * SIZES["num_layers"] * RECOMPUTED[recompute]


def test_transformers_models_take_it_in_every_layer(kernel_calls: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    from colotrain.models.huggingface_loss import isolating_loss

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids, numbers = torch.randint(0, 50, (1, 16)), torch.tensor([[0] * 5 + [1] * 11])
    found = isolating_loss(model.forward, input_ids=ids, document_ids=numbers).logits
    assert kernel_calls == [5, 11] * 2
    wanted = torch.cat([model(input_ids=part).logits for part in ids.split([5, 11], 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_plan_counts_one_kernel_of_the_gpu(recompute: Recompute) -> None:
    """Its FLOPs are those of attention without documents, which by default fill the samples."""

    def found(*names: str, size: int = 4) -> Any:
        tokens = torch.empty(32, dtype=torch.int64, device="meta")
        with torch.device("meta"):
            model = LLM(**SIZES)
        return trace(
            model,
            dict.fromkeys(("input_ids", "labels", *names), tokens),
            precision="bf16",
            checkpointing=recompute,
            device="cuda",
            micro_batch=size,
        )

    plain, apart = found(), found("document_ids")
    flops = [sum(s.work.attention_flops for s in one.segments) for one in (plain, apart)]
    assert flops[0] == flops[1] > 0
    operations = [
        sum(s.work.num_ops for s in found("document_ids", size=size).segments) for size in (4, 8)
    ]
    assert operations[0] == operations[1]  # one call, however many documents there are
