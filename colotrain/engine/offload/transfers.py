"""Transfers between tiers that run beside training: pages read and written, copies on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from colotrain.engine.offload.disk import Region, fetch, write
from colotrain.engine.offload.group_storage import GroupStorage
from colotrain.engine.sharding.fsdp_internals import is_being_gathered, is_on_one_rank


class Transfers:
    """One thread that reads pages ahead, one that writes them back, and CUDA's copies."""

    def __init__(self, *, device: str) -> None:
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="tiers-read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self.writing: Future[None] | None = None
        self.copy_stream = torch.cuda.Stream() if device == "cuda" else None

    def read_ahead(self, unchanged: list[Region], changed: list[Region]) -> Future[None]:
        """Start reading pages: those that are only read, and those that are written as well."""
        return self.reader.submit(fetch, unchanged, changed)

    def write_back(self, regions: list[Region]) -> None:
        """Start writing `regions` back, once those handed over before are written."""
        if not regions:
            return
        self._wait_for_writes()
        self.writing = self.writer.submit(write, regions)

    def _wait_for_writes(self) -> None:
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    @contextmanager
    def copying(self, *, after_update: bool) -> Iterator[None]:
        """On CUDA, run copies on their own stream, in parallel with another group's update."""
        if self.copy_stream is None:
            yield
            return
        if after_update:
            self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            yield

    def order_copies(self) -> None:
        """Make the update's stream wait for the copies made so far."""
        if self.copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self.copy_stream)

    def wait_for_copies(self) -> None:
        if self.copy_stream is not None:
            self.copy_stream.synchronize()

    def finish(self) -> None:
        """Wait until every copy is made and every page written."""
        self.wait_for_copies()
        self._wait_for_writes()


class GatherPrefetch:
    """Reads the pages of the group that will be gathered next, and drops those just gathered."""

    def __init__(self, storages: Sequence[GroupStorage], transfers: Transfers) -> None:
        self.storages, self.transfers = storages, transfers
        self.order: dict[tuple[int, int], int] = {}
        """The last two groups gathered → the group that was gathered after them the last time."""
        self.gathered = (-1, -1)

    def watch(self, index: int, fsdp_group: Any) -> None:
        """After every all-gather of the group, drop its pages and read those of the next group."""
        if hasattr(fsdp_group, "_colotrain_gather"):
            return
        alone = is_on_one_rank(fsdp_group)  # then `wait_for_unshard` copies out of the shards
        name = "wait_for_unshard" if alone else "unshard"
        gather = fsdp_group._colotrain_gather = getattr(fsdp_group, name)

        @functools.wraps(gather)
        def watched(*args: Any, **kwargs: Any) -> Any:
            pending = is_being_gathered(fsdp_group)
            reads = pending if alone else not (pending or fsdp_group.is_unsharded)
            result = gather(*args, **kwargs)
            if reads:
                self._gathered(index)
            return result

        setattr(fsdp_group, name, watched)

    def _gathered(self, index: int) -> None:
        self.order[self.gathered], self.gathered = index, (self.gathered[1], index)
        if self.storages[index].parameters == "disk":
            for region in self.storages[index].pages("parameters"):
                region.drop()
        following = self.storages[self.order.get(self.gathered, index)]
        if following.parameters == "disk" and following.index != index:
            self.transfers.read_ahead(following.pages("parameters"), [])
