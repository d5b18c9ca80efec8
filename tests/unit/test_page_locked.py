"""Page-locked memory: torch's own where CUDA cannot register pages, an error where it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colotrain.engine.offload.page_locked import page_locked
from colotrain.errors import ColotrainError

SIZES, DTYPES = [3, 0, 5], [torch.float32, torch.float32, torch.bfloat16]


def answers(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def test_registered_memory_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(0, monkeypatch)
    first, nothing, last = page_locked(SIZES, DTYPES)
    assert [t.numel() for t in (first, nothing, last)] == SIZES
    assert last.dtype == torch.bfloat16
    assert 0 < last.data_ptr() - first.data_ptr() <= 4096


def test_torch_locks_what_cuda_cannot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(801, monkeypatch)
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def fake(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Any:
        asked.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", fake)
    assert [t.dtype for t in page_locked(SIZES, DTYPES)] == DTYPES
    assert asked == [(3, True), (0, True), (5, True)]


def test_a_refusal_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(2, monkeypatch)
    with pytest.raises(ColotrainError, match=r"plugin\.budget\.host: 4,096 bytes"):
        page_locked(SIZES, DTYPES)
