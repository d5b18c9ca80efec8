"""Transfers between tiers that run beside training: pages read and written, copies on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.offload.blocks import Window
from colotrain.engine.offload.disk import Region, fetch, write
from colotrain.engine.offload.group_storage import GroupStorage
from colotrain.engine.sharding.fsdp_internals import is_being_gathered, is_on_one_rank


class Transfers:
    """One thread that reads pages ahead, one that writes them back, and CUDA's copies.

    On CUDA what goes up and what goes down has a stream each, so that both directions are used at
    once.
    """

    def __init__(self, *, device: str) -> None:
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="tiers-read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self.writing: Future[None] | None = None
        self.on_gpu = device == "cuda"
        self.up = torch.cuda.Stream() if self.on_gpu else None
        self.down = torch.cuda.Stream() if self.on_gpu else None
        self.parameter_window, self.gradient_window = Window(), Window()
        self.state_window = Window()
        self.leaving: tuple[Tensor, torch.cuda.Event] | None = None
        """Memory of the stream `up` that is being copied down, and the event after that copy."""

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
    def going_up(self) -> Iterator[None]:
        """On CUDA, run copies to the GPU beside the update of another group."""
        with torch.cuda.stream(self.up) if self.up is not None else nullcontext():
            yield

    @contextmanager
    def going_down(self) -> Iterator[None]:
        """On CUDA, run copies to the host once the update so far is done.

        Memory that they leave free is used by a later copy up, which therefore waits for them.
        """
        if self.up is None or self.down is None:
            yield
            return
        self.down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.down):
            yield
        self.up.wait_stream(self.down)

    def order_copies(self) -> None:
        """Make the update's stream wait for the copies up made so far."""
        if self.up is not None:
            torch.cuda.current_stream().wait_stream(self.up)

    def keep_while_leaving(self, gradients: Tensor) -> None:
        """Keep `gradients`, memory of the stream `up`, until the copy down that has begun is over.

        Only the call after the next one can use the memory again: in the meantime another group's
        gradients are copied up.
        """
        assert self.down is not None
        self.release_gradients()
        self.leaving = gradients, self.down.record_event()

    def release_gradients(self) -> None:
        """Free the gradients that were kept, for copies up after they have left."""
        if self.leaving is not None:
            assert self.up is not None
            self.up.wait_event(self.leaving[1])
            self.leaving = None

    def order_gradients(self) -> None:
        """Make the current stream wait until all gradients are in their tier."""
        if self.down is not None:
            self.gradient_window.finish()
            torch.cuda.current_stream().wait_stream(self.down)
            self.release_gradients()

    def wait_for_gradients(self) -> None:
        """Let the host wait until all gradients are in their tier."""
        self.order_gradients()
        self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Let the host wait until all copies down are made."""
        if self.down is not None:
            self.down.synchronize()

    def finish(self) -> None:
        """Wait until every page is written. Copies to page-locked memory may still be made."""
        self.state_window.finish()
        self._wait_for_writes()


class GatherPrefetch:
    """Reads the pages of the group that will be gathered next, and drops those just gathered."""

    def __init__(self, storages: Sequence[GroupStorage], transfers: Transfers) -> None:
        self.storages, self.transfers = storages, transfers
        self.order: dict[tuple[int, int], int] = {}
        """The last two groups gathered → the group that was gathered after them the last time."""
        self.gathered = (-1, -1)
        self.watched: list[Any] = []
        """Groups whose all-gathers are watched."""

    def watch(self, index: int, fsdp_group: Any) -> None:
        """After every all-gather of the group, drop its pages and read those of the next group."""
        if any(known is fsdp_group for known in self.watched):
            return
        self.watched.append(fsdp_group)
        alone = is_on_one_rank(fsdp_group)  # then `wait_for_unshard` copies out of the shards
        name = "wait_for_unshard" if alone else "unshard"
        gather = getattr(fsdp_group, name)

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
