"""Recomputing on a GPU: whichever kernel computes attention, random numbers stay in order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.spec.plan import Recompute
from tests.unit.engine.test_recompute import SEQ_LEN, WIDTH, Model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def gradients(seed: int, dropout: float, recompute: Recompute) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model: nn.Module = Model(dropout).cuda().bfloat16()
    checkpoint_blocks_(model, recompute)
    x = torch.randn(4, 8 * SEQ_LEN, WIDTH, device="cuda", dtype=torch.bfloat16)
    loss = model(x)
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attention_drops", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_those_of_a_model_that_keeps_everything(
    backend: str, attention_drops: bool, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    if not attention_drops:  # dropout after attention, none in it
        attend = nn.functional.scaled_dot_product_attention
        without = lambda *args, dropout_p=0.0, **kwargs: attend(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", without)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            plain_loss, plain = gradients(seed, 0.3, "none")
        except RuntimeError as error:
            pytest.skip(f"{backend} is not for this GPU: {error}")
        loss, again = gradients(seed, 0.3, recompute)
    assert loss == plain_loss
    assert again.keys() == plain.keys()
    for name, gradient in plain.items():  # some kernels add up in any order
        assert (again[name] - gradient).norm() <= 0.02 * gradient.norm(), name
