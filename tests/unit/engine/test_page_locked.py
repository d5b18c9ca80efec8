"""Page-locked memory: written before CUDA locks it, unlocked before it is unmapped."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.engine.offload.page_locked import page_locked, tell_once

NUM_BYTES = 5_000_000
WHOLE = 5_001_216  # bytes of the pages that hold them


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = ([int(part, 16) for part in line.split()[0].split("-")] for line in lines)
    return any(start <= address < end for start, end in ends)


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of these pages that are in memory, by the kernel's own table."""
    first, count = address // 4096, num_bytes // 4096
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(first * 8)
        entries = memoryview(table.read(count * 8)).cast("Q")
    return sum(4096 for entry in entries if entry >> 63)


class Runtime:
    """Stands in for `torch.cuda.cudart()`; answers every registration with `code`."""

    def __init__(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.seen = code, list[tuple[Any, ...]]()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda n: self.seen.append(("wait", n)))

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.seen.append(("register", num_bytes, flags, resident_bytes(address, num_bytes)))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.seen.append(("unregister", is_mapped(address)))
        return 0


def test_pages_are_there_before_they_are_registered_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(0, monkeypatch)
    memory = page_locked(NUM_BYTES)
    assert runtime.seen == [("register", WHOLE, 0, WHOLE)]
    assert (memory.shape, memory.dtype) == ((NUM_BYTES,), torch.uint8)
    assert memory.data_ptr() % 4096 == 0


def test_they_are_unlocked_before_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0, monkeypatch)
    view = page_locked(NUM_BYTES)[7:]
    gc.collect()
    assert len(runtime.seen) == 1  # a view keeps them
    address = view.data_ptr()
    del view
    assert runtime.seen[1:] == [("wait", 3), ("unregister", True)]
    assert not is_mapped(address)


def test_torch_locks_what_cuda_cannot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    Runtime(801, monkeypatch)
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def fake(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Any:
        asked.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", fake)
    assert page_locked(NUM_BYTES).dtype == torch.uint8
    assert asked == [(NUM_BYTES, True)]


@pytest.mark.parametrize("code", [1, 2, 801])
def test_a_refusal_is_told_once_and_the_memory_is_not_locked(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, told = Runtime(code, monkeypatch), list[str]()

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    tell_once(told.append)
    for _ in range(2):
        memory = page_locked(NUM_BYTES)
        assert memory.shape == (NUM_BYTES,)
        assert not memory.any()
    del memory
    (text,) = told
    assert f"does not page-lock {WHOLE:,} bytes of host memory (error {code})" in text
    assert all(name == "register" for name, *_ in runtime.seen)


def test_no_bytes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Runtime(0, monkeypatch)
    assert page_locked(0).shape == (1,)
