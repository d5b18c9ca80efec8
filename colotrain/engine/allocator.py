"""Configures glibc's malloc for a worker on CPU; with another libc nothing happens.

Memory that lives as long as the run (shards, optimizer state) gets its own pages. Memory of one
step comes from one heap that is not returned to the system between steps, because new pages cost a
quarter of a step's time. By default malloc mixes the two, and the holes between them stay resident.

Nor has that heap fast bins. The few bytes that are cut off an aligned tensor went there and were
not merged with the tensor's own memory when it was freed, and a free part of exactly a tensor's
size is too small for the next tensor of that size: each recomputed block made the heap larger.
"""

from __future__ import annotations

import ctypes

from colotrain.spec.cpu_memory import OWN_PAGES_BYTES

M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3
"""Parameter numbers of mallopt, from glibc's malloc.h."""
BUILD_MMAP_BYTES = 128 << 10
"""While the model is built, allocations of at least this size get their own pages."""
STEP_TRIM_BYTES = 1 << 30
"""While training, free bytes at the end of the heap that are kept for the next step."""


def configure_malloc_for_build() -> None:
    """Configure malloc for memory that lasts; call before the model and the optimizer are built."""
    _set(M_MMAP_THRESHOLD, BUILD_MMAP_BYTES)


def configure_malloc_for_steps() -> None:
    """Configure malloc for one step's memory and trim the heap; call when the run is built."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    _set(M_MXFAST, 0)
    _set(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)
    _set(M_TRIM_THRESHOLD, STEP_TRIM_BYTES)


def _set(parameter: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(parameter, value)
