"""Page-locked memory: torch's own where CUDA cannot register pages, an error where it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colotrain.engine.offload.page_locked import page_locked
from colotrain.errors import ColotrainError

NUM_BYTES = 100


def answers(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def test_registered_memory_begins_at_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(0, monkeypatch)
    memory = page_locked(NUM_BYTES)
    assert memory.shape == (NUM_BYTES,)
    assert memory.dtype == torch.uint8
    assert memory.data_ptr() % 4096 == 0


def test_torch_locks_what_cuda_cannot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(801, monkeypatch)
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def fake(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Any:
        asked.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", fake)
    assert page_locked(NUM_BYTES).dtype == torch.uint8
    assert asked == [(NUM_BYTES, True)]


def test_a_refusal_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(2, monkeypatch)
    with pytest.raises(ColotrainError, match="4,096 bytes of host memory cannot be page-locked"):
        page_locked(NUM_BYTES)
