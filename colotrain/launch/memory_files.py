"""Anonymous files in the launcher's memory, in which its workers keep copies of their state.

They outlive the workers and have no name in any file system, so that the kernel frees them however
the launcher ends.
"""

from __future__ import annotations

import os
from contextlib import suppress

from colotrain.spec.plan import RunPlan

COPIES = 2


class MemoryFiles:
    """The files of this machine's workers; none where the plan or the system has no such files."""

    def __init__(self, plan: RunPlan) -> None:
        wanted = plan.elastic.memory_copy.enabled and hasattr(os, "memfd_create")
        num = COPIES * plan.cluster.procs_per_node if wanted else 0
        self.handles = [os.memfd_create("colotrain-copy", os.MFD_CLOEXEC) for _ in range(num)]

    def paths(self) -> list[str]:
        """Return, for each local rank, the paths of its files, separated by colons."""
        found = [f"/proc/{os.getpid()}/fd/{handle}" for handle in self.handles]
        return [
            os.pathsep.join(found[start : start + COPIES]) for start in range(0, len(found), COPIES)
        ]

    def close(self) -> None:
        """Free the memory, unless workers still run."""
        handles, self.handles = self.handles, []
        for handle in handles:
            with suppress(OSError):
                os.close(handle)
