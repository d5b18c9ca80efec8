"""How glibc's malloc places what a worker holds on the CPU; nothing happens with another libc.

What lives as long as the run (shards, optimizer state) is given pages of its own; what comes and
goes in a step shares one heap, which is never given back in between: new pages cost a quarter of
the time of a step. Left to itself malloc mixes the two, and the holes between them stay resident.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""
LASTING_BYTES = 128 << 10
"""While building, allocations from this size on get pages of their own."""
FLEETING_BYTES = 32 << 20
"""While training, only those from this size on do; malloc accepts no more than this."""
KEPT_BYTES = 1 << 30
"""While training, so much free memory at the end of the heap is kept for the next step."""


def place_what_stays() -> None:
    """To be called before the model and the optimizer are built."""
    _set(M_MMAP_THRESHOLD, LASTING_BYTES)


def place_what_passes() -> None:
    """To be called when everything that lasts is there: what building left over is given back."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    _set(M_MMAP_THRESHOLD, FLEETING_BYTES)
    _set(M_TRIM_THRESHOLD, KEPT_BYTES)


def _set(parameter: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(parameter, value)
