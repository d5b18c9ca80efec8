"""Access to torch's private names, except those of `fully_shard`
(`engine.sharding.fsdp_internals`).

Each name is looked up when this module is imported, so that a torch without one of them is
reported at once. That runs no operation: TORCH_CUDA_SANITIZER would initialise CUDA at the first
one, in the fork server, and no worker could then use it. Written against torch 2.13.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.library import Library
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorms
from torch.nn.modules.dropout import _DropoutNd as Dropouts

from colotrain.errors import ColotrainError

KNOWN = "2.11 to 2.13"
FIX = "install torch>=2.11,<2.14"


def unknown_torch(error: Exception | str) -> ColotrainError:
    """Return the error for a torch that lacks a name on which colotrain relies."""
    return ColotrainError(f"torch {torch.__version__} ({KNOWN} are known): {error}", FIX)


try:
    from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.distributed_c10d import (
        _get_default_group,
        _get_default_store,
        _set_pg_timeout,
    )
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    call_after_backward: Callable[[Callable[[], None]], None] = (
        torch.autograd.Variable._execution_engine.queue_callback
    )
    """Register a function, during a backward, to be called when that backward is over."""
    choose_attention = torch._fused_sdp_choice
    saved_tensor_hooks_now = torch._C._autograd._top_saved_tensors_default_hooks
    multiply, multiply_ = torch._foreach_mul, torch._foreach_mul_
    norms_of, copy_together = torch._foreach_norm, torch._foreach_copy_
    keep_versions = torch.autograd._unsafe_preserve_version_counter
    """Context in which in-place changes of tensors do not count for autograd."""
    interpolate, interpolate_ = torch._foreach_lerp, torch._foreach_lerp_
    signs_, subtract_ = torch._foreach_sign_, torch._foreach_sub_
    checkpoint_file = torch.utils.checkpoint.__file__
    for owner, names in (
        (torch._C, "_current_graph_task_id"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (Tensor, "_backward_hooks _post_accumulate_grad_hooks _version _base"),
        (torch.UntypedStorage, "_cdata"),
        (nn.Module(), "_buffers _compiled_call_impl _non_persistent_buffers_set _parameters"),
        (torch.ops.aten.add.Tensor, "_schema"),
        (Library, "_destroy"),
        (pytree, "tree_flatten tree_leaves tree_map tree_unflatten"),
    ):
        for name in names.split():
            getattr(owner, name)
except (ImportError, AttributeError) as error:
    raise unknown_torch(error) from error

COMPUTED_AGAIN: Any = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
"""Marker of selective checkpointing, from torch 2.13 on, for an output that is recomputed."""
without_modes = _disable_current_modes
cannot_use_cuda: Callable[[], bool] = getattr(torch._C, "_cuda_isInBadFork", lambda: False)
"""Whether this process is a fork of one that used CUDA."""

__all__ = [
    "BatchNorms",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "Dropouts",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "pytree",
    "tree_leaves",
]


class NeedsCUDA(BaseException):
    """A fork that cannot use CUDA was to do so. No user's `except Exception` takes it."""


def keep_from_threads_and_cuda() -> None:
    """Let a fork compute in one thread, for it has no others, and raise `NeedsCUDA`."""
    torch.set_num_threads(1)
    if cannot_use_cuda():
        torch.cuda._lazy_init = _needs_cuda


def _needs_cuda() -> NoReturn:
    raise NeedsCUDA


def is_in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_called_by_backward() -> bool:
    """Whether a backward calls this code, other than to recompute activations as torch does."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint_file:
            return False
        frame = frame.f_back
    return True


def call_instead_(module: nn.Module, act: Callable[..., Any] | None) -> None:
    """Let a call of `module` be one of `act`, without its hooks; None: the module's own again.

    torch calls `act` in place of hooks and forward where `nn.Module.compile` has made it.
    """
    module._compiled_call_impl = act


def uncompiled_(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the model without torch.compile on it or on modules in it, and whether there was any.

    A compiled module has another around it, which adds `_orig_mod` to the names of parameters.
    """
    whole = _within(model)
    found = whole is not model
    for module in list(whole.modules()):
        for name, child in module.named_children():
            if _within(child) is not child:
                module._modules[name] = _within(child)
                found = True
    for module in whole.modules():
        if module._compiled_call_impl is not None:
            call_instead_(module, None)
            found = True
    return whole, found


def _within(module: Any) -> Any:
    """The module that torch.compile has put another around; its class would load the compiler."""
    while type(module).__name__ == "OptimizedModule":
        module = module._orig_mod
    return module


def hooks_of(tensor: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks of `register_hook`."""
    hooks: Mapping[int, Callable[..., Any]] = tensor._backward_hooks or {}
    return hooks


def has_hooks(parameter: Tensor) -> bool:
    """Whether something else than an optimizer gets or changes a parameter's gradient."""
    return bool(hooks_of(parameter) or hooks_after_gradient_of(parameter))


def forget_hooks(tensor: Tensor) -> None:
    tensor._backward_hooks = None


def hooks_after_gradient_of(tensor: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks of `register_post_accumulate_grad_hook`."""
    hooks: Mapping[int, Callable[..., Any]] = tensor._post_accumulate_grad_hooks or {}
    return hooks


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor's memory was changed in place; 0 where nobody counts.

    Nobody does for tensors that were made under `torch.inference_mode`.
    """
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which autograd considers `tensor` a view, or None."""
    return tensor._base


def storage_id(tensor_or_storage: Any) -> int:
    """Return an id shared by all tensors with the same storage; 0 within `torch.vmap`."""
    found = tensor_or_storage
    try:
        storage = found.untyped_storage() if isinstance(found, Tensor) else found
    except NotImplementedError:
        return 0
    key: int = storage._cdata
    return key


def saves_tensors_by_hooks() -> bool:
    """Whether hooks keep the tensors that backward needs, as where they are computed again."""
    return saved_tensor_hooks_now(False) is not None


def arguments_of(operation: Any) -> Any:
    """Return an operation's declared arguments, which tell those it writes to."""
    return operation._schema.arguments


@contextmanager
def operations_instead(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Call `functions`, by the names of operations in aten, for tensors on the meta device.

    Only operations that torch makes of others can be named.
    """
    library = Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, function, "AutogradMeta")
        yield
    finally:
        library._destroy()


def is_random(operation: Any) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def name_of(operation: Any) -> str:
    """Return the name of an operation without its namespace."""
    return str(operation._schema.name).rpartition("::")[2]


def is_persistent(module: nn.Module, buffer: str) -> bool:
    return buffer not in module._non_persistent_buffers_set


def own_store() -> Any:
    """Make another connection to the default process group's store.

    One thread's wait on a connection blocks the others that use it.
    """
    store: Any = _get_default_store()
    return store.clone()


def timeout_s(*groups: dist.ProcessGroup) -> float:
    """Return the shortest timeout in seconds of `groups` and the default process group."""
    backends = [g._get_backend(torch.device("cpu")) for g in (*groups, _get_default_group())]
    return min(float(backend.options._timeout.total_seconds()) for backend in backends)


def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup) -> None:
    """Set `output` [size * n, ...] to the `input` [n, ...] of every rank of the group."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter(output: Tensor, input: Tensor, *, group: dist.ProcessGroup) -> None:
    """Set `output` [n, ...] to this rank's part of the sum of all ranks' [size * n, ...]."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, input, group=group)


def wait_as_long_as_all_(group: dist.ProcessGroup) -> None:
    """Give `group` the timeout of the default process group."""
    if group is not _get_default_group() and dist.get_backend(group) != "fake":
        _set_pg_timeout(datetime.timedelta(seconds=timeout_s()), group)


def fake_store() -> Any:
    """Return a store for the backend `fake`, which simulates the other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def memory_tracker() -> Any:
    """Return torch's class that tracks the memory of `fully_shard`."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    return FSDPMemTracker
