"""The only module that uses private names of torch's `fully_shard`.

A rename in torch must be noticed: with `getattr(param, "_unsharded_param", None)` gradients would
be lost silently. So this module checks on import that every private name exists that the engine
relies on. Checked against the sources of torch 2.11, 2.12 and 2.13.

`state` is torch's FSDPState, `group` its FSDPParamGroup, `param` its FSDPParam.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from types import CodeType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from colotrain.torch_internals import copy_together, keep_versions, unknown_torch

try:
    from torch._C import _are_functorch_transforms_active, _DisableFuncTorch
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, free_storage
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
        FSDPCommContext,
        FSDPParamGroup,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError as error:
    raise unknown_torch(error) from error

__all__ = ["AllGather", "DDPMeshInfo", "DefaultAllGather", "free_storage"]

RELIED_ON: dict[type, str] = {
    FSDPModule: "_get_fsdp_state",
    FSDPState: "_comm_ctx _fsdp_param_group _lazy_init _modules _pre_backward "
    "_register_pre_backward_hook",
    FSDPCommContext: "all_gather_state",
    FSDPParamGroup: "_all_gather_process_group _all_gather_result _all_reduce_process_group "
    "_init_mp_dtypes _orig_dtype _reduce_dtype _register_post_backward_hook _to_unsharded "
    "all_reduce_grads device fsdp_params is_unsharded mp_policy post_backward "
    "reduce_grads unshard wait_for_unshard",
    FSDPParam: "_contiguous_orig_stride _get_grad_inner_tensor _orig_size _param_fqn "
    "_sharded_param_data _unsharded_param accumulate_unsharded_grad_if_needed all_gather_inputs "
    "all_gather_outputs alloc_all_gather_outputs free_unsharded_param param_dtype "
    "contiguous_sharded_stride init_all_gather_outputs init_unsharded_param mp_policy "
    "offload_to_cpu padded_sharded_param_size reduce_dtype sharded_param sharded_size "
    "to_sharded_dtensor to_unsharded unsharded_accumulated_grad unsharded_accumulated_grad_data "
    "unsharded_grad_data unsharded_param",
    DTensor: "_local_tensor",
}
"""Class → attributes the engine uses: private ones, and those of private classes."""
SEVERAL_GROUPS: dict[type, str] = {FSDPState: "_fsdp_param_groups"}
"""Attributes since torch 2.12; before, a module has at most one group."""
REDUCES_UNUSED: dict[type, str] = {
    FSDPParamGroup: "reduce_scatter_unused_params",
    FSDPModule: "set_reduce_scatter_unused_params",
}
"""Attributes since torch 2.13; before, a rank reduces only parameters with a gradient there."""

SEVERAL_MODULES: dict[type, str] = {FSDPState: "_force_complete_incomplete_states"}
"""Attributes since torch 2.13; before, every forward must call all modules of a group once."""


def missing(relied_on: dict[type, str]) -> list[str]:
    """Return the names that no method, annotation or base of their class mentions."""
    return [
        f"{cls.__name__}.{name}"
        for cls, names in relied_on.items()
        for name in names.split()
        if name not in _mentioned(cls)
    ]


def _mentioned(cls: type) -> set[str]:
    """Return a class's attributes, and all names in its methods, which may create attributes."""
    found: set[str] = set(dir(cls))
    for base in cls.__mro__:
        found |= set(vars(base).get("__annotations__", ())) | set(vars(base).get("__slots__", ()))
        for value in vars(base).values():
            code = getattr(getattr(value, "fget", value), "__code__", None)
            if isinstance(code, CodeType):
                found |= set(code.co_names)
    return found


def check_names() -> None:
    """Raise `ColotrainError` where this torch lacks a name that the engine relies on."""
    if gone := missing(RELIED_ON):
        raise unknown_torch(f"it has no {', '.join(gone)}")


check_names()
HAS_SEVERAL_GROUPS = not missing(SEVERAL_GROUPS)
HAS_REDUCES_UNUSED = not missing(REDUCES_UNUSED)
HAS_SEVERAL_MODULES = not missing(SEVERAL_MODULES)


# -- sharded tensors


def dtensor_of(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """Return a DTensor of global `shape` with `local` as its local part, placed like `like`.

    `DTensor.from_local` would copy a part on the host to the mesh's device.
    """
    return dtensor(local, like.device_mesh, like.placements, shape)


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


# -- a module that is sharded


def state_of(module: nn.Module | FSDPModule) -> Any:
    """Return the FSDPState of a module that `fully_shard` was applied to."""
    return module._get_fsdp_state()  # type: ignore[operator]


def groups_of(module: nn.Module | FSDPModule) -> list[Any]:
    """Return the module's FSDPParamGroups; none where it has no parameters."""
    state = state_of(module)
    if HAS_SEVERAL_GROUPS:
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def modules_of(state: Any) -> Sequence[nn.Module]:
    """Return the modules whose parameters are gathered together."""
    modules: Sequence[nn.Module] = state._modules
    return modules


def initialise_lazily(root: nn.Module | FSDPModule) -> None:
    """Do now what torch does at the first forward: it decides where the shards are."""
    state_of(root)._lazy_init()


def gather_before_backward_of(state: Any, outputs: list[Tensor]) -> None:
    """Register `outputs` as tensors through which backward reaches the module."""
    state._register_pre_backward_hook(outputs)


def before_backward_of(state: Any, check: Callable[[], None]) -> None:
    """Call `check` before a backward reaches the module.

    If it raises, nothing of the backward has begun: torch would never finish another one.
    """
    original = state._pre_backward

    def pre_backward(gradient: Tensor) -> Any:
        check()
        return original(gradient)

    state._pre_backward = pre_backward


def gather_outside_transforms(module: nn.Module) -> None:
    """Gather the module's groups before its forward, where `torch.func` transforms it.

    Made within a transform (`jvp`, `jacfwd`), whole parameters would be tensors of it, which no
    gradient reaches.
    """

    def gather(*_: Any) -> None:
        if _are_functorch_transforms_active():
            with _DisableFuncTorch():
                for group in groups_of(module):
                    group.unshard()
                    group.wait_for_unshard()

    module.register_forward_pre_hook(gather, prepend=True)


def end_backward_of(group: Any, register: Any) -> None:
    """Let `register(args, kwargs)` end the backward of a group, instead of torch."""
    group._register_post_backward_hook = register


def forget_gathered(state: Any) -> None:
    """Drop the output buffer of a group's all-gather."""
    state._comm_ctx.all_gather_state = None


def reduce_unused_(model: nn.Module, groups: Sequence[Any]) -> None:
    """Reduce parameters that a rank did not use as zeros: other ranks may have used them."""
    if HAS_REDUCES_UNUSED:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        return
    for group in groups:
        group.__class__ = ReducesUnused


class ReducesUnused(FSDPParamGroup):
    """FSDPParamGroup of torch before 2.13, which also reduces parameters without a gradient."""

    reduce_scatter_unused_params = True

    def post_backward(self, *unused: Any) -> None:
        if self.reduce_grads and self.reduce_scatter_unused_params:
            for param in self.fsdp_params:
                whole = unsharded_of(param)
                if whole is None or not whole.requires_grad or whole.grad is not None:
                    continue
                if param.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole)
        super().post_backward(*unused)


# -- a group of parameters


def is_on_one_rank(group: Any) -> bool:
    """Whether the group's shards are on one rank, which needs no other rank to gather them."""
    return bool(group._all_gather_process_group.size() == 1)


def is_being_gathered(group: Any) -> bool:
    """Whether an all-gather has begun and was not waited for yet."""
    return group._all_gather_result is not None


def register_unsharded(group: Any) -> None:
    """Let the modules use the whole parameters, which must be in memory, after any all-gather."""
    group._all_gather_result = None
    group._to_unsharded()


def fill_unsharded(group: Any, params: Sequence[Any]) -> None:
    """Copy shards that are whole into whole parameters in their dtype, with one call for all."""
    for param in params:
        numel = param.padded_sharded_param_size.numel()
        param.init_all_gather_outputs([numel], [gathered_dtype_of(param)], 1, group.device)
        param.alloc_all_gather_outputs()
    outputs = [param.all_gather_outputs[0] for param in params]
    if outputs:
        with torch.no_grad(), keep_versions(tuple(outputs)):
            copy_together(outputs, [flat_shard(param) for param in params])
    for param in params:
        param.init_unsharded_param()


def update_dtypes(group: Any) -> None:
    """Update the dtypes of the parameters that train now; the group itself does so only once."""
    group._init_mp_dtypes()


def dtype_of(group: Any) -> torch.dtype | None:
    """Return the dtype of the sharded trainable parameters; None where all are frozen."""
    dtype: torch.dtype | None = group._orig_dtype
    return dtype


def reduce_dtype_of(group: Any) -> torch.dtype | None:
    """Return the dtype in which gradients are summed; None for the gradients' own."""
    dtype: torch.dtype | None = group._reduce_dtype
    return dtype


def replicas_of(group: Any) -> dist.ProcessGroup:
    """Return the process group of the ranks with the same shard as this one, in a hybrid mesh."""
    replicas: dist.ProcessGroup = group._all_reduce_process_group
    return replicas


# -- a parameter


def name_of(param: Any) -> str:
    return str(param._param_fqn)


def size_of(param: Any) -> torch.Size:
    """Return the shape of the whole parameter."""
    size: torch.Size = param._orig_size
    return size


def unsharded_of(param: Any) -> nn.Parameter | None:
    """Return the whole parameter, which autograd works on; None before its first use."""
    whole: nn.Parameter | None = param.__dict__.get("_unsharded_param")
    return whole


def unsharded_parameters_of(group: Any) -> list[Tensor]:
    """Return the whole parameters of a group, after their first use."""
    return [param.unsharded_param for param in group.fsdp_params]


def set_unsharded(param: Any, whole: nn.Parameter) -> None:
    param._unsharded_param = whole


def view_unsharded(param: Any, flat: Tensor) -> Tensor:
    """View the elements of `flat`, padding left out, in the shape of the whole parameter."""
    return flat.as_strided(param._orig_size, param._contiguous_orig_stride)


def zero_gradient(param: Any) -> Tensor:
    """Return the zeros that torch reduces for a parameter that was not used."""
    zeros: Tensor = param._get_grad_inner_tensor(torch.zeros_like(param.unsharded_param))
    return zeros


def flat_shard(param: Any) -> Tensor:
    """Return this rank's shard, flat, padding included."""
    flat: Tensor = param._sharded_param_data
    return flat


def put_shard(param: Any, flat: Tensor, *, fresh: bool) -> None:
    """Put the shard of `param` into `flat`, padding included; values are copied unless `fresh`."""
    if not fresh:
        flat.copy_(param._sharded_param_data)
    rows = param.sharded_param._local_tensor.shape[0]
    param._sharded_param_data = flat
    param.sharded_param._local_tensor = flat.view(param.padded_sharded_param_size)[:rows]


def local_of(tensor: Any) -> Tensor:
    """Return the part of a DTensor that this rank holds, without a record for autograd."""
    local: Tensor = tensor._local_tensor
    return local


def as_strided_in(flat: Tensor, like: Tensor) -> Tensor:
    """Return the part of `flat` at which `like` is in its own storage."""
    return flat.as_strided(
        like.size(), like.stride(), flat.storage_offset() + like.storage_offset()
    )


# -- a parameter whose shard is below the GPU


class GathersFromBelow(FSDPParam):
    """FSDPParam whose input of the all-gather comes from `source`, on the GPU."""

    source: Callable[[], Tensor]

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        return [self.source()]


def gather_from(param: Any, source: Callable[[], Tensor]) -> None:
    """Take the input of the parameter's all-gather, flat and in its dtype, from `source()`."""
    param.source, param.__class__ = source, GathersFromBelow


def rests_below(param: Any) -> bool:
    """Whether the parameter and its gradient rest below the GPU."""
    return isinstance(param, GathersFromBelow)


def gathered_dtype_of(param: Any) -> torch.dtype:
    """Return the dtype in which the parameter is gathered."""
    dtype: torch.dtype = param.param_dtype or param.sharded_param.dtype
    return dtype


class ReducesBelow(Protocol):
    """Takes part in the reduction of gradients that rest below the GPU; gets torch's FSDPParams."""

    def bring_up(self, params: Sequence[Any], reducing: Any) -> list[ReducedOnDevice]: ...

    def put_down(self, reduced: Sequence[ReducedOnDevice], reducing: Any) -> None: ...


@dataclass(slots=True)
class _Leaf:
    """Stands for a sharded parameter to which a gradient is assigned."""

    grad: Any
    _post_accumulate_grad_hooks: None = None


class ReducedOnDevice:
    """Stands for an FSDPParam while its gradient is reduced: the gradient stays on the GPU."""

    offload_to_cpu = False

    def __init__(self, param: Any, grad: Tensor | None) -> None:
        self.param = param
        self.sharded_param = _Leaf(None if grad is None else param.to_sharded_dtensor(grad))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.param, name)


_foreach_reduce: Callable[..., Any] = _fsdp_param_group.foreach_reduce
REDUCING_STREAM = 3
"""Position of the stream of the reduction among the arguments of `foreach_reduce`."""


@functools.wraps(_foreach_reduce)
def _reduce(params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    below: ReducesBelow | None = getattr(params[0], "_colotrain_below", None)
    if below is None:
        return _foreach_reduce(params, *args, **kwargs)
    reducing = args[REDUCING_STREAM - 1]
    reduced = below.bring_up(params, reducing)
    found = _foreach_reduce(reduced, *args, **kwargs)
    below.put_down(reduced, reducing)
    return found


def reduce_below(group: Any, below: ReducesBelow) -> None:
    """Let `below` take part in the reduction of a group's gradients."""
    assert list(signature(_foreach_reduce).parameters)[REDUCING_STREAM] == "reduce_scatter_stream"
    for param in group.fsdp_params:
        param._colotrain_below = below
    _fsdp_param_group.foreach_reduce = _reduce  # type: ignore[assignment]


def hooks_after_accumulation(leaf: Any) -> list[Callable[[Tensor], None]]:
    """Return the hooks that `register_post_accumulate_grad_hook` registered."""
    return list((leaf._post_accumulate_grad_hooks or {}).values())
