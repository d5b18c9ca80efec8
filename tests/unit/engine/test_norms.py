"""Norms of gradients, whatever they are stored in."""

from __future__ import annotations

import pytest
import torch

from colotrain.engine.gradients.gradients import norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_norm_is_as_exact_as_float32_and_never_overflows(dtype: torch.dtype) -> None:
    drawn = [torch.randn(100_003) * 300, torch.randn(7, 5), torch.zeros(3)]
    tensors = [tensor.to(dtype) for tensor in drawn]
    mixed = [*tensors, torch.ones(4, dtype=torch.float64), torch.ones(9, dtype=torch.bfloat16)]
    for found, tensor in zip(norms(mixed), mixed, strict=True):
        exact = torch.linalg.vector_norm(tensor.double()).item()
        assert found.item() == pytest.approx(exact, rel=1e-5)
