"""What CUDA's libraries and torch's allocator take beside live tensors. Standard library only.

Sources: torch's "CUDA semantics" (cuBLAS workspaces; memory management), NVIDIA's cuBLAS reference
(cublasSetWorkspace recommends 32 MiB from Hopper on, 4 MiB before), c10/cuda/CUDACachingAllocator.
Measured: 64 MiB beside the tensors (H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-26).
"""

from __future__ import annotations

import os
import re

from colotrain.planner.layout import Layout

WORKSPACE_BYTES = 32 << 20
"""Workspace of a cuBLAS handle and stream on Hopper and later; before Hopper it is 8.1 MiB."""
HANDLES = 2
"""Threads that multiply matrices, each with a handle of its own: training's and autograd's."""
LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES = 20 << 20, 2 << 20
"""Steps in which the allocator takes memory for tensors of more and of less than 1 MiB. Of each, a
stream's last one may be almost empty."""
STREAMS = 4
"""Streams that allocate: one that computes, two that gather and one that reduces."""


def gpu_margin_bytes(layout: Layout) -> int:
    """Return the most bytes of the last segment of each stream."""
    streams = STREAMS + (layout.replicas > 1) + (layout.chunk_bytes is not None)
    return streams * (LARGE_SEGMENT_BYTES + SMALL_SEGMENT_BYTES)


def workspace_bytes(layout: Layout, *, handles: int = HANDLES) -> int:
    """Return the bytes of cuBLAS's workspaces, which torch counts as tensors; 0 on CPU.

    Each has what CUBLAS_WORKSPACE_CONFIG asks for (`:KiB:count…`), or the default of Hopper.
    """
    if layout.device != "cuda":
        return 0
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    asked = sum(int(size) * int(count) << 10 for size, count in pairs)
    return handles * (asked if pairs else WORKSPACE_BYTES)
