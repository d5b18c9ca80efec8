"""What the card gives without any training: `python ceilings.py OUT.json`, in half a minute.

Copies and matrix products at llm-1b's shapes, attention by each of torch's kernels, what a launch
costs, which kernels a norm is, and page-locked host memory.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1 << 30
SHAPES = (
    *((8192, 8192, 8192), (8192, 2048, 2048), (8192, 5632, 2048), (8192, 2048, 5632)),
    *((8192, 512, 2048), (2048, 32768, 2048)),
)
"""Rows, columns and inner size: the largest usual one, then llm-1b's at 8,192 tokens."""
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def seconds(act: Callable[[], object], repeat: int = 10, warm: int = 3) -> float:
    """Median of the device's own time."""
    for _ in range(warm):
        act()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product(shape: tuple[int, int, int]) -> float:
    rows, columns, inner = shape
    a, b = normal(rows, inner), normal(inner, columns)
    return 2 * rows * columns * inner / seconds(lambda: a @ b) / 1e12


def copying() -> float:
    there = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(there)
    return 2 * there.numel() / seconds(lambda: other.copy_(there)) / 1e12


def attention(kernel: str) -> float:
    """Forward and backward of 4 × 2,048 tokens, 16 heads of 128, 4 of keys and values; ms."""
    q = normal(4, 16, 2048, 128).requires_grad_()
    k, v = (normal(4, 4, 2048, 128).requires_grad_() for _ in range(2))

    def act() -> None:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.sum().backward()

    return seconds(act) * 1e3


def launches() -> dict[str, float]:
    """The host's time for one small operation, alone and under autograd; µs."""
    x = torch.zeros(16, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3000):
        x.add_(1)
    alone = (time.perf_counter() - began) / 3000
    torch.cuda.synchronize()
    y = torch.zeros(16, device="cuda", requires_grad=True)
    began = time.perf_counter()
    for _ in range(1000):
        y = y * 1.0
    forward = (time.perf_counter() - began) / 1000
    began = time.perf_counter()
    y.sum().backward()
    backward = (time.perf_counter() - began) / 1000
    return {"alone": alone * 1e6, "forward": forward * 1e6, "backward": backward * 1e6}


def kernels_of_a_norm() -> list[str]:
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    norm = torch.nn.RMSNorm(2048).cuda().bfloat16()
    with Names():
        norm(normal(8192, 2048).requires_grad_()).sum().backward()
    return seen


def host_memory() -> dict[str, Any]:
    """Page-locking 4 GiB as they come, and as huge pages that all cores touched; then PCIe."""
    found: dict[str, Any] = {}
    size, runtime = 4 * GIB, torch.cuda.cudart()
    for kind in ("plain", "huge"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(pages, dtype=torch.uint8)
        began = time.perf_counter()
        if kind == "huge":
            pages.madvise(mmap.MADV_HUGEPAGE)
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda part: part[::4096].fill_(0), flat.chunk(64)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        code = int(runtime.cudaHostRegister(address, size, 0))
        found[kind] = {"code": code, "GB/s": size / 1e9 / (time.perf_counter() - began)}
        if code == 0:
            here, there = flat[:GIB], torch.empty(GIB, dtype=torch.uint8, device="cuda")
            up = seconds(lambda a=there, b=here: a.copy_(b, non_blocking=True), 4, 1)
            down = seconds(lambda a=here, b=there: a.copy_(b, non_blocking=True), 4, 1)
            found[kind] |= {"up GB/s": GIB / 1e9 / up, "down GB/s": GIB / 1e9 / down}
            runtime.cudaHostUnregister(address)
    began = time.perf_counter()
    torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found["torch's pin_memory GB/s"] = size / 1e9 / (time.perf_counter() - began)
    return found


def main() -> None:
    card = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {"card": card.name, "memory": card.total_memory}
    found |= {"torch": torch.__version__, "nccl": str(torch.cuda.nccl.version())}
    every: dict[str, Callable[[], Any]] = {
        "copy TB/s": copying,
        **{f"product {s} TFLOP/s": functools.partial(product, s) for s in SHAPES},
        **{f"attention {k} ms": functools.partial(attention, k) for k in KERNELS},
        "a norm's kernels": kernels_of_a_norm,
        "launch µs": launches,
        "host memory": host_memory,
    }
    for name, measure in every.items():
        try:
            found[name] = measure()
        except Exception as error:  # the others go on
            found[name] = f"{type(error).__name__}: {error}"[:200]
    text = json.dumps(found, indent=1, default=str, ensure_ascii=False)
    Path(sys.argv[1]).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
