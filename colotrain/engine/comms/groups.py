"""The process groups of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from colotrain.spec.axes import (
    COPY,
    CP,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    MATRICES,
    PP,
    STAGE,
    TP,
    Axis,
    Ranks,
)
from colotrain.torch_internals import wait_as_long_as_all_


class Groups:
    """`groups[axis]` has the ranks that differ from this one in an axis of the mesh alone.

    `groups[STAGE]` has the ranks of this one's stage, and `groups[COPY]` those of its copy there.
    All ranks must make the groups, and call `another` and `new`. Every group has the timeout of the
    default one.
    """

    def __init__(self, ranks: Ranks, device: str) -> None:
        self.ranks, self.rank, self.device = ranks, dist.get_rank(), device
        sizes = {axis.value: size for axis, size in ranks.sizes.items() if axis is not CP}
        # torch would split a group that is bound to a device, with NCCL's options for its gloo,
        # too, which warns of them and takes defaults instead of the group's own interface
        backends: dict[int | str, Any] = {
            axis: dist.get_backend() for axis, size in sizes.items() if size < ranks.world
        }
        self.mesh = init_device_mesh(
            device, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=backends
        )
        data = tuple(axis for axis in sizes if axis in (DP_REPLICATE, DP_SHARD))
        self.data_mesh = self.mesh if len(data) == len(sizes) else self.mesh[data]
        """The ranks that hold the same part of the same stage, whole or in shards."""
        for group in self.mesh.get_all_groups():  # torch's own timeout is 10 minutes, with gloo 30
            wait_as_long_as_all_(group)
        self._by_axes: dict[Axis | tuple[Axis, ...], Any] = {
            axis: self.mesh.get_group(axis.value) for axis in ranks.sizes if axis is not CP
        }
        self._by_axes[STAGE] = dist.group.WORLD if PP not in ranks.sizes else self.another(*STAGE)
        if not (MATRICES & ranks.sizes.keys()):
            self._by_axes[COPY] = self._by_axes[DP_SHARD]
        elif DP_REPLICATE in ranks.sizes:
            self._by_axes[COPY] = self.another(*COPY)
        else:
            self._by_axes[COPY] = self._by_axes[STAGE]
        for axis in (axis for axis in (EP, TP) if axis in ranks.sizes):  # a parameter has one
            alone = not ranks.sizes.keys() >= MATRICES
            found = self._by_axes[COPY] if alone else self.another(DP_SHARD, axis)
            self._by_axes[DP_SHARD, axis] = found
        if CP in ranks.sizes:
            self._by_axes[CP] = self.another(CP)

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._by_axes[axes]
        return group

    def sum_(self, values: Tensor, axes: Collection[Axis]) -> None:
        """Sum `values` in place over the ranks that differ in some axes of a copy (collective).

        These are one axis, or all that divide a tensor.
        """
        own = tuple(axis for axis in COPY if axis in axes)
        dist.all_reduce(values, group=self[own if len(own) > 1 else own[0]])

    def by_matrices(self) -> DeviceMesh:
        """Return the ranks of this stage as a mesh in which EP and TP come before DP_SHARD.

        So a parameter is divided: into parts of experts or matrices, and each of these into shards.
        """
        axes = [axis for axis in (DP_REPLICATE, EP, TP, DP_SHARD) if axis in self.ranks.sizes]
        sizes = [self.ranks.size(axis) for axis in STAGE]
        stage = self.ranks.of_stage(self.ranks.coords(self.rank)[PP])
        ranks = torch.tensor(stage).view(sizes).movedim(1, -1)
        return DeviceMesh.from_group(
            [self[axis] for axis in axes],
            self.device,
            ranks.reshape([self.ranks.size(axis) for axis in axes]),
            mesh_dim_names=tuple(axis.value for axis in axes),
        )

    def another(self, *axes: Axis) -> dist.ProcessGroup:
        """Make one more group of the ranks that differ in these axes, with an order of its own."""
        (group,) = self.new(self.ranks.groups(*axes)).values()
        return group

    def new(self, members: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Make a group of each tuple of ranks; return those that this rank is in."""
        groups = {ranks: dist.new_group(list(ranks)) for ranks in members}
        own = {ranks: group for ranks, group in groups.items() if self.rank in ranks}
        for group in own.values():
            wait_as_long_as_all_(group)
        return own
