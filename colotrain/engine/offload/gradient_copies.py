"""Reduced gradients of groups below a GPU: one copy per group, beside the backward of the next.

`fully_shard` would copy each gradient by itself, and let the host wait before it adds to one that
is there already. Here it reduces on the GPU and adds there, to gradients of earlier micro-batches
that were copied up for it; then the group's gradients are copied down together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.gradients.gradients import norms
from colotrain.engine.offload.blocks import Block, Window, allocate
from colotrain.engine.offload.disk import DiskStore
from colotrain.engine.offload.group_storage import GroupStorage, take
from colotrain.engine.offload.transfers import Transfers
from colotrain.engine.sharding.fsdp_internals import (
    ReducedOnDevice,
    as_strided_in,
    hooks_after_accumulation,
    local_of,
)


class GradientCopies:
    """The copies of one group's sharded gradients."""

    def __init__(
        self,
        storage: GroupStorage,
        transfers: Transfers,
        store: DiskStore | None,
        norms_of: dict[str, Tensor],
    ) -> None:
        self.storage, self.transfers, self.store = storage, transfers, store
        self.norms = norms_of
        self.names = {id(param): name for name, param in storage.names.items()}
        self.block: Block | None = None
        self.copied: torch.cuda.Event | None = None
        """Event after the last copy to the block."""
        self.adds = False
        """Whether earlier micro-batches' gradients are being added to."""

    @property
    def window(self) -> Window:
        return self.transfers.gradient_window

    def bring_up(self, params: Sequence[Any], reducing: Any) -> list[ReducedOnDevice]:
        """Return stand-ins for `params`, with the gradients so far for the stream `reducing`."""
        self.adds = params[0].sharded_param.grad is not None
        if not self.adds:
            return [ReducedOnDevice(param, None) for param in params]
        assert self.block is not None
        assert self.transfers.up is not None
        if self.copied is not None:
            self.transfers.up.wait_event(self.copied)
        with torch.cuda.stream(self.transfers.up):
            flat = self.window.to_device(self.block).view(self.block.dtypes[0])
        reducing.wait_stream(self.transfers.up)
        grads = [local_of(param.sharded_param.grad) for param in params]
        return [
            ReducedOnDevice(param, as_strided_in(flat, grad))
            for param, grad in zip(params, grads, strict=True)
        ]

    def put_down(self, reduced: Sequence[ReducedOnDevice], reducing: Any) -> None:
        """Copy what was reduced to the block, once the stream `reducing` has done it."""
        grads = [local_of(each.sharded_param.grad) for each in reduced]
        flat = _whole_storage(grads[0])
        assert all(g.untyped_storage().data_ptr() == flat.data_ptr() for g in grads if g.numel())
        if self.block is None or self.block.sizes != [len(flat)]:
            self.block = self._allocate(flat)
        down = self.transfers.down
        assert down is not None
        down.wait_stream(reducing)
        with torch.cuda.stream(down):
            self._measure(reduced, grads)
            self.window.to_host(self.block, flat.view(torch.uint8))
            self.copied = down.record_event()
        if self.adds:
            self.transfers.keep_while_leaving(flat)
        else:  # it is memory of the reducing stream
            reducing.wait_stream(down)
        (whole,) = self.block.views()
        for each, grad in zip(reduced, grads, strict=True):
            leaf = each.param.sharded_param
            leaf.grad = each.param.to_sharded_dtensor(as_strided_in(whole, grad))
            if hooks := hooks_after_accumulation(leaf):
                self.transfers.wait_for_gradients()  # a user's hook may read it
                for hook in hooks:
                    hook(leaf)

    def _allocate(self, flat: Tensor) -> Block:
        sizes, dtypes, region = [len(flat)], [flat.dtype], None
        if self.storage.parameters == "disk":
            region = take(self.store, sizes, dtypes)
            self.storage.regions["gradients"] = [region]
        return allocate(sizes, dtypes, region)

    def _measure(self, reduced: Sequence[ReducedOnDevice], grads: Sequence[Tensor]) -> None:
        """Note the norms while the gradients are on the GPU."""
        names = [self.names[id(each.param)] for each in reduced]
        here = [(n, grad) for n, grad in zip(names, grads, strict=True) if grad.numel()]
        self.norms.update(zip((n for n, _ in here), norms([g for _, g in here]), strict=True))


def _whole_storage(part: Tensor) -> Tensor:
    """Return all elements of the storage of `part`."""
    numel = part.untyped_storage().nbytes() // part.itemsize
    return part.as_strided((numel,), (1,), 0)
