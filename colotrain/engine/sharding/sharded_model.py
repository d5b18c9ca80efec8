"""Sharding a model: one engine (`fully_shard`) with the settings of a plugin.

A group, whose parameters are gathered and reduced together, is one `fully_shard` call; parameters
in no group belong to the root group. The collectives sum gradients and never average them: the only
code that divides is in `accumulation`.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.engine.model.model_checks import check_parameters, check_precision
from colotrain.engine.model.precision import cast_dtype, cast_of, keep_statistics_exact_
from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.parts.wholes import shards_of
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.sharding.boundary_tensors import watch_tensors
from colotrain.engine.sharding.fsdp_internals import (
    gather_outside_transforms,
    groups_of,
    initialise_lazily,
    reduce_unused_,
    size_of,
    update_dtypes,
)
from colotrain.engine.sharding.parameters import (
    Attached,
    ForwardWatch,
    attach_,
    attached_to,
    watch_replaced,
)
from colotrain.engine.sharding.tensor_parallel import TensorGroup
from colotrain.errors import ColotrainError
from colotrain.models.loading import allocate_, fill_
from colotrain.spec.axes import DP_SHARD, EP
from colotrain.spec.plan import ModelPlan, PluginPlan, RunPlan
from colotrain.spec.plugins import stays_gathered
from colotrain.torch_internals import is_called_by_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are gathered and reduced together."""

    name: str
    handle: FSDPModule
    stays_gathered: bool
    """Whether parameters stay gathered from a step's first forward to its last backward."""
    chunk: int = 0
    """The chunk of the rank's blocks that uses it, where a pipeline stage has several."""

    @property
    def fsdp_groups(self) -> list[Any]:
        """torch's records of the group (FSDPParamGroup); none where it has no parameters."""
        return groups_of(self.handle)

    @property
    def params(self) -> list[Any]:
        """torch's records of the group's parameters (FSDPParam)."""
        return [param for group in self.fsdp_groups for param in group.fsdp_params]

    def copy_out(self) -> None:
        """Free the group's all-gather buffer, if the last backward gathered the group in vain.

        Backward prefetches the frozen group before the first trained one; the next forward uses it.
        """
        for params in self.fsdp_groups:
            params.wait_for_unshard()

    def refresh_dtypes(self) -> None:
        """Update the dtypes of the parameters that train now; torch does so only once."""
        for params in self.fsdp_groups:
            update_dtypes(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """A model after `shard_`, with its groups in the order of the model and the root group last."""

    module: nn.Module
    source: ModelPlan
    groups: tuple[Group, ...]
    plugin: PluginPlan
    comms: Groups
    attached: dict[str, Attached] = field(default_factory=dict)
    """Parameter name → hooks and attributes that the user's code gave it."""

    calls: list[int] = field(default_factory=list)
    """Indices of the groups in the order in which this step's forwards called them."""

    norms: dict[str, Tensor] = field(default_factory=dict)
    """Parameter name → norm of its sharded gradient, where it was measured on arrival."""

    parts: PartMap
    """Parameter name → what this rank has of it, for all parameters of the model in their order."""

    tensor: TensorGroup = field(default_factory=TensorGroup)
    """The ranks that divide the matrices, of which `fully_shard` sees nothing but the own part."""

    stage: Stage = field(default_factory=Stage)
    """The blocks that this rank holds, where there are pipeline stages."""

    in_common: dict[str, Group] = field(default_factory=dict)
    """Name → group that is never gathered now: the ranks of a host share one copy of it."""

    def order_of_calls(self) -> int:
        """Return a number that differs (almost surely) when the order of calls does.

        It has 12 bits, so that squares summed over a thousand ranks are exact in float64.
        """
        return zlib.crc32(repr(self.calls).encode()) >> 20

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank's stage holds; others are on the meta device."""
        found = module_tree.named_parameters(self.module)
        yield from ((name, p) for name, p in found if self.parts[name].is_here)

    def device_of(self, parameter: nn.Parameter) -> torch.device:
        """Return where a parameter is, or would be if another stage did not hold it."""
        return torch.device(self.comms.device) if parameter.is_meta else parameter.device

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's stage that train now, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def fsdp_params(self) -> Iterator[Any]:
        for group in self.groups:
            yield from group.params

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that divide this rank's copy of the model among themselves."""
        return self.comms[DP_SHARD]


def shard_(
    model: nn.Module,
    plan: RunPlan,
    comms: Groups,
    modules_of: list[tuple[str, list[nn.Module]]],
    *,
    offloads: Callable[[int], bool] = lambda index: False,
    tensor: TensorGroup | None = None,
    stage: Stage | None = None,
    frozen: Mapping[str, str] | None = None,
) -> ShardedModel:
    """Apply the plan's plugin to `model` in place, in the groups that `find_groups` found.

    All ranks must call, after freezing. A group with `offloads(index)` (the root group has the last
    index) keeps parameters and gradients on the host and is updated there. `frozen` has the pattern
    of each frozen parameter.
    """
    check_parameters(model, plan.model)
    check_precision(model, plan.train.precision)
    tensor, stage = tensor or TensorGroup(), stage or Stage()
    attached = attached_to(model)
    known = dict(module_tree.named_parameters(model))
    originals = {name: weakref.ref(parameter) for name, parameter in known.items()}
    for parameter in known.values():  # fully_shard takes only contiguous ones
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    modules_of = [*modules_of, ("", [model])]
    groups = _fully_shard_(modules_of, plan, comms, stage, offloads)
    if (compute := cast_dtype(plan.train.precision)) is not None:
        keep_statistics_exact_(model)
        model.register_forward_pre_hook(partial(_cast_activations, compute), with_kwargs=True)
    parts = PartMap.of(model, comms, splits=tensor.splits, holders=stage.holders, axis=tensor.axis)
    parts.freeze(frozen or {})
    sharded = ShardedModel(
        module=model,
        source=plan.model,
        groups=tuple(groups),
        plugin=plan.plugin,
        comms=comms,
        attached=attached,
        parts=parts,
        tensor=tensor,
        stage=stage,
    )
    watch_replaced(originals, model)
    attach_(model, sharded.fsdp_params(), attached, ranks=_ranks_under_ddp(sharded))
    reduce_unused_(model, [params for group in groups for params in group.fsdp_groups])
    ForwardWatch(list(sharded.fsdp_params())).install(model, [group.handle for group in groups])
    for module in (module for _, modules in modules_of for module in modules):
        watch_tensors(module)
    for index, group in enumerate(groups):
        module = cast(nn.Module, group.handle)
        module.register_forward_pre_hook(partial(_called, sharded, index))
        gather_outside_transforms(module)
    return sharded


def _ranks_under_ddp(sharded: ShardedModel) -> int:
    """Return the number of ranks whose samples' gradients are summed, of parameters with hooks.

    No divided expert has a hook: each rank of its group has a part of the gradient.
    """
    tensor = sharded.tensor
    return sharded.comms.data_mesh.size() * (tensor.shard.size if tensor.axis is EP else 1)


def _called(sharded: ShardedModel, index: int, *_: Any) -> None:
    """Note a call of a group; refuse one by which a backward would lose the group's gradients."""
    if is_called_by_backward():
        raise ColotrainError(
            f"model: a hook or a Function calls {sharded.groups[index].name} in backward, which no "
            "forward before the first step did",
            "call it in forward, and keep what backward needs of it",
        )
    sharded.calls.append(index)


def _fully_shard_(
    modules_of: list[tuple[str, list[nn.Module]]],
    plan: RunPlan,
    comms: Groups,
    stage: Stage,
    offloads: Callable[[int], bool],
) -> list[Group]:
    """Apply torch's `fully_shard` to the modules of each group; the last one is the root's."""
    compute, (_, (model,)) = cast_dtype(plan.train.precision), modules_of[-1]
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32 if compute else None
    )
    known = [*module_tree.named_parameters(model)]
    # fully_shard takes neither scalars nor empty ones; every rank holds them whole (see
    # `reduce_replicated_`); other stages' parameters stay on the meta device
    ignored = {p for n, p in known if not (p.ndim and p.numel() and stage.holds(n))}
    groups = []
    for index, (name, modules) in enumerate(modules_of):
        is_root, stays = index == len(modules_of) - 1, stays_gathered(name, plan.plugin)
        fully_shard(  # type: ignore[call-overload]
            modules[0] if len(modules) == 1 else modules,
            mesh=comms.data_mesh,
            mp_policy=replace(policy, cast_forward_inputs=False) if is_root else policy,
            ignored_params=ignored,
            reshard_after_forward=not (stays or is_root),
            **_offload(offloads(index)),
        )
        handle = cast(Any, modules[0])
        # gloo has no PREMUL_SUM, which a divide factor would ask for
        handle.set_gradient_divide_factor(1.0)
        handle.set_force_sum_reduction_for_comms(True)
        chunk = stage.chunk_of(name)
        groups.append(Group(name=name, handle=handle, stays_gathered=stays, chunk=chunk))
    return groups


def _cast_activations(
    dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], batch: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast a batch to the compute dtype, except for tensors that the output is compared with."""
    return inputs, {n: t.to(dtype) if cast_of(n, t, dtype) else t for n, t in batch.items()}


def _offload(wanted: bool) -> dict[str, CPUOffloadPolicy]:
    """Return an offload policy without pinning: the tiers allocate pinned memory where possible."""
    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if wanted else {}


def begin_forward(sharded: ShardedModel) -> None:
    """Free what the backward before has gathered in vain."""
    if sharded.comms.device == "cpu":
        for group in sharded.groups:
            group.copy_out()


def begin_backward(
    sharded: ShardedModel, *, last: bool, chunk: int = 0, ends_step: bool | None = None
) -> None:
    """Set what every group reduces and frees in the backward that follows.

    In the last one of a step everything is reduced and freed: a group that stayed gathered across
    the optimizer's step would continue with stale weights. Where a pipeline stage has several
    chunks, the backward is that of one `chunk`, and the `last` one of that chunk. It leaves the
    other chunks' groups alone, which torch visits at the end of every backward: they would reduce
    zeros. `ends_step` says whether it is the last backward of all chunks.
    """
    reduce_now = last or sharded.plugin.gradients == "sharded"
    for group in sharded.groups:
        own = group.chunk == chunk
        free = (own and last) or not group.stays_gathered
        group.handle.set_requires_gradient_sync(own and reduce_now, recurse=False)
        group.handle.set_requires_all_reduce(own and last, recurse=False)
        group.handle.set_reshard_after_backward(free, recurse=False)
    sharded.groups[-1].handle.set_is_last_backward(last if ends_step is None else ends_step)
    if last and sharded.plugin.gradients == "whole":
        _even_out_accumulated(group for group in sharded.groups if group.chunk == chunk)


def _even_out_accumulated(groups: Iterable[Group]) -> None:
    """Add zeros for parameters no micro-batch has used yet, in the dtype of the other sums.

    In mixed precision the sums of a group are in the reduce dtype, but a gradient that first comes
    in the last micro-batch is not, and a group must be reduced in one dtype.
    """
    for group in groups:
        if all(param.unsharded_accumulated_grad is None for param in group.params):
            continue
        for param in group.params:
            if param.sharded_param.requires_grad and param.unsharded_accumulated_grad is None:
                whole = torch.zeros(size_of(param), dtype=param.reduce_dtype)
                param.unsharded_accumulated_grad = whole.to(param.sharded_param.device)


def replicated(sharded: ShardedModel) -> dict[str, nn.Parameter]:
    """Return the scalar and empty parameters, which every rank of a stage holds whole."""
    return {n: p for n, p in sharded.named_parameters() if not sharded.parts[n].is_sharded}


def reshard(sharded: ShardedModel) -> None:
    """Free all whole parameters, kept ones too: after an evaluation, or when code changes them."""
    for group in sharded.groups:
        group.handle.reshard()
        for param in (p for g in group.fsdp_groups if not g.is_unsharded for p in g.fsdp_params):
            type(param).free_unsharded_param(param)


def materialise_(
    sharded: ShardedModel,
    *,
    device: str,
    seed: int,
    allocate: Callable[[bool], None] = lambda fresh: None,
    release: Callable[[Tensor], None] = lambda tensor: None,
    given: Set[str] = frozenset(),
    ahead_bytes: int = 0,
) -> None:
    """Give a model on the meta device its storage and initial weights. All ranks must call.

    Tensors whose names are in `given` may be left without values, as a checkpoint overwrites them.
    `allocate(fresh)` may move the parameters' storage, before it is filled (`fresh`) or after;
    `release(parameter)` is called whenever a parameter was filled or read. `ahead_bytes`, the same
    on all ranks, may be drawn before they are stored.
    """
    model = sharded.module
    for parameter in replicated(sharded).values():  # fully_shard moves only those it shards
        if not parameter.is_meta:
            parameter.data = parameter.data.to(sharded.comms.device)
    if any(p.is_meta for _, p in sharded.named_parameters()):
        on_host = {id(p.sharded_param) for p in sharded.fsdp_params() if p.offload_to_cpu}
        known = module_tree.named_parameters(model)
        elsewhere = {id(p) for n, p in known if not sharded.parts[n].is_here}
        allocate_(model, device=device, on_host=on_host, elsewhere=elsewhere)
        allocate(True)
        parts, comms = sharded.parts, sharded.comms
        shards = shards_of(model, parts, comms, release=release, ahead_bytes=ahead_bytes)
        fill_(model, sharded.source, seed=seed, shards=shards, given=given)
        _move_buffers_(model, device)
    else:
        allocate(False)
    for name, parameter in module_tree.named_parameters(model):
        if name in sharded.attached and not isinstance(parameter, DTensor):
            sharded.attached[name].register(parameter, ranks=_ranks_under_ddp(sharded))
    initialise_lazily(sharded.groups[-1].handle)


def numel_of(param: Any) -> int:
    """Return the elements of a rank's shard, padding included."""
    return int(param.padded_sharded_param_size.numel())


def _move_buffers_(model: nn.Module, device: str) -> None:
    """Move buffers to `device` that `init_weights()` made elsewhere."""
    for module in module_tree.modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != device:
                module._buffers[name] = buffer.to(device)
