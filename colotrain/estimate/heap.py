"""glibc's heap as a worker uses it while training: how much of it stays resident.

Free parts of the heap below its top are not given back, so the process is as large as the heap ever
was. Chunks are taken by best fit and merge when they are freed (glibc's malloc.c: unsorted and
large bins, `_int_malloc`); what exceeds the mmap threshold has pages of its own. The thresholds
are those that `engine.allocator` sets. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort

FLEETING_BYTES = 32 << 20
"""As in `engine.allocator`."""
ALIGNMENT = 64
HEADER_BYTES = 16
SPARE_BYTES = ALIGNMENT + 32
"""An aligned request looks for a chunk that is larger by this, and gives the rest back: so a hole
of just its size is passed over (`_int_memalign`)."""
SMALL_BYTES = 1024
"""Below it, chunks fill what larger ones leave over."""
SPREAD, RECOMPUTED_SPREAD, HELD_SPREAD, BETWEEN_SPREAD = 0.05, 0.25, 1.35, 0.7
"""How much further the heap reaches in a real step: shares of what is simulated here, of what
passes where blocks are computed again, and of the gradients' shards; at least that of activations
where micro-batches accumulate.

Shards of gradients are put where backward has just freed memory, and stay until the next step;
small objects (nodes of autograd's graph, saved variables) lie around them, and where blocks are
computed again also between what forward frees at once. While these live, holes do not merge, and a
hole of exactly a tensor's size is passed over. When a second micro-batch begins, what the kept
gradients' small objects leave free are parts that its tensors do not fit into: with 2 MiB in use of
120, the heap grew by half, and by 0.9 over hundreds of steps. Fitted on 49 runs (1, 2 and 4 ranks)
of models that `benchmarks/planner.py` does not draw.
"""


class Heap:
    """Addresses of what is alive, as best fit places it."""

    def __init__(self) -> None:
        self.top = 0
        """The end of the highest chunk in use."""
        self.extent = 0
        """The highest top so far: everything below it is resident."""
        self.used = 0
        self.live: dict[object, tuple[int, int]] = {}
        self.free: list[tuple[int, int]] = []
        """(size, start), sorted."""
        self.starts: dict[int, int] = {}
        """Start of a free chunk → its size."""
        self.ends: dict[int, int] = {}
        """End of a free chunk → its start."""

    @property
    def slack(self) -> int:
        """Resident bytes that nothing uses."""
        return self.extent - self.used

    def spread(self, standing: int, held: int, *, recomputes: bool, between: int = 0) -> int:
        """Bytes that the real heap reaches beyond this one's extent.

        `standing` of its bytes stay through the step, `held` are the gradients' shards, `between`
        are the activations that come anew within a step, where it has several micro-batches.
        """
        passing = max(0, self.extent - standing) if recomputes else 0
        share = SPREAD * self.extent + RECOMPUTED_SPREAD * passing + HELD_SPREAD * held
        return round(max(share, BETWEEN_SPREAD * min(between, self.extent)))

    def take(self, key: object, num_bytes: int) -> None:
        if num_bytes < SMALL_BYTES or num_bytes >= FLEETING_BYTES:
            return
        size = -(-(num_bytes + HEADER_BYTES) // ALIGNMENT) * ALIGNMENT
        at = bisect_left(self.free, (size + SPARE_BYTES, -1))
        if at < len(self.free):
            found, start = self.free.pop(at)
            del self.starts[start], self.ends[start + found]
            if found > size:
                self._add(start + size, found - size)
        else:
            start, self.top = self.top, self.top + size
            if self.top > self.extent:
                self.extent = self.top
        self.live[key] = (start, size)
        self.used += size

    def give(self, key: object) -> None:
        start, size = self.live.pop(key, (0, 0))
        if not size:
            return
        self.used -= size
        before = self.ends.get(start)
        if before is not None:
            self._remove(before, self.starts[before])
            start, size = before, size + start - before
        after = self.starts.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        if start + size == self.top:
            self.top = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self.free, (size, start))
        self.starts[start], self.ends[start + size] = size, start

    def _remove(self, start: int, size: int) -> None:
        del self.free[bisect_left(self.free, (size, start))]
        del self.starts[start], self.ends[start + size]
