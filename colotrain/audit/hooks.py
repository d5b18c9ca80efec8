"""Hooks on torch and DeepSpeed, by public names, which tell the observer of the script's calls."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as optimizers

from colotrain.audit import model
from colotrain.audit.observer import Observer
from colotrain.audit.sites import here
from colotrain.audit.window import OF_ONE, SUMMED, note_factor, target_counts
from colotrain.rundir import RunDir

FACTORS = {
    "__mul__": False,
    "__rmul__": False,
    "__imul__": False,
    "mul": False,
    "mul_": False,
    "__truediv__": True,
    "__itruediv__": True,
    "div": True,
    "div_": True,
}
"""Method of tensors that may scale a loss → whether it divides."""

CLIPS = {
    "clip_grad_norm_": "max_norm",
    "clip_grads_with_norm_": "max_norm",
    "clip_grad_value_": "clip_value",
}
"""Function that clips gradients → its argument for the limit."""


def _new_observer() -> Observer:
    rundir = RunDir(os.environ["COLOTRAIN_AUDIT"])
    return Observer(rundir, steps=int(os.environ.get("COLOTRAIN_AUDIT_STEPS") or 0))


class _Current:
    """The observer of this process; a fork begins with a new one."""

    def __init__(self) -> None:
        self.observer = _new_observer()
        self.scaling = False
        """Whether a GradScaler is scaling a loss."""
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.observer, self.scaling = _new_observer(), False


_current: _Current | None = None


def observer() -> Observer:
    assert _current is not None
    return _current.observer


def wrap(
    owner: Any, name: str, *, before: Any = None, after: Any = None, silences: bool = False
) -> None:
    """Call `before(args, kwargs)` and `after(result, args, kwargs)` around `owner.name`.

    What is called within it is not observed if it `silences`.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen = observer()
        if seen.quiet or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if before is not None:
            with seen.guarded():
                before(args, kwargs)
        seen.quiet += silences
        try:
            result = original(*args, **kwargs)
        finally:
            seen.quiet -= silences
        if after is not None:
            with seen.guarded():
                after(result, args, kwargs)
        return result

    setattr(owner, name, wrapper)


def observe_torch() -> None:
    """Install all hooks on torch: called once, right after its import."""
    global _current
    if _current is not None or not os.environ.get("COLOTRAIN_AUDIT"):
        return
    _current = _Current()
    for name, inverse in FACTORS.items():
        _wrap_factor(name, inverse)
    _wrap_sums()
    _wrap_backward()
    _wrap_optimizers()
    _wrap_eval()
    _wrap_clipping()
    _wrap_schedulers()
    _wrap_grad_scaler()
    _wrap_checkpoint()
    _wrap_sampler()
    _wrap_cross_entropy()
    _wrap_forward()
    if "torch.distributed.fsdp" in sys.modules:
        observe_fsdp()


def _wrap_forward() -> None:
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        seen = observer()
        if not seen.quiet and not seen.backward_depth:
            with seen.guarded():
                seen.forward(self, (args, kwargs))
        seen.forward_depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            seen.forward_depth -= 1

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _wrap_factor(name: str, inverse: bool) -> None:
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        is_loss = type(result) is Tensor or model.is_dtensor(result)
        if is_loss and result.requires_grad and result.dim() == 0 and len(args) == 1:
            seen = observer()
            if not seen.quiet:
                loss, by = self, args[0]
                if not self.requires_grad:
                    loss, by = args[0], self
                with seen.guarded():
                    scaling = _current is not None and _current.scaling
                    site = here()
                    note_factor(result, loss, by, inverse=inverse, site=site, scale=scaling)
        return result

    setattr(Tensor, name, wrapper)


def _wrap_sums() -> None:
    """Note at a loss that is a sum how many numbers it adds, and at a mean if it is of one.

    The methods alone: `torch.jit.script` knows `torch.sum` by its identity.
    """

    def note(result: Any, args: Any, _: Any, *, sums: bool) -> None:
        of = args[0]
        if isinstance(result, Tensor) and result.requires_grad and not result.dim():
            if not observer().is_looking or result.grad_fn is None:
                return
            metadata: Any = result.grad_fn.metadata  # torch annotates it as a method
            if of.numel() == 1:
                metadata[SUMMED] = OF_ONE
            elif sums and not model.is_dtensor(of):
                metadata[SUMMED] = int(of.detach().count_nonzero()), of.numel()

    wrap(Tensor, "sum", after=functools.partial(note, sums=True))
    wrap(Tensor, "mean", after=functools.partial(note, sums=False))


def _wrap_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        seen = observer()
        outer = not seen.backward_depth and not seen.quiet
        if outer:
            with seen.guarded():
                plain = grad_tensors is grad_variables is inputs is None or (
                    inputs is None and grad_tensors in ((None,), [None])
                )
                seen.backward(tensors, plain=plain and not create_graph)
        seen.backward_depth += 1
        try:
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        except BaseException:
            seen.taps.detach()
            raise
        finally:
            seen.backward_depth -= 1
        if outer:
            with seen.guarded():
                seen.after_backward()

    torch.autograd.backward = backward


def _wrap_optimizers() -> None:
    def made(_: Any, args: Any, __: Any) -> None:
        observer().optimizers.made(args[0])

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        seen = observer()
        if seen.quiet or not seen.optimizers.enter(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if seen.backward_depth or not callable(closure):
            with seen.guarded():
                (seen.stepping_in_backward if seen.backward_depth else seen.entering)(optimizer)
            return None

        @functools.wraps(closure)
        def wrapped() -> Any:
            result = closure()
            seen.window.closure_calls += 1
            if seen.window.closure_calls == 1:
                with seen.guarded():
                    seen.entering(optimizer)
                seen.window.is_closed = True
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def after(optimizer: Optimizer, _: Any, __: Any) -> None:
        seen = observer()
        if not seen.quiet and seen.optimizers.leave(optimizer) and not seen.backward_depth:
            with seen.guarded():
                seen.stepped(optimizer)

    wrap(Optimizer, "__init__", after=made)
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    for owner in (Optimizer, nn.Module):
        wrap(owner, "zero_grad", before=lambda args, kwargs: observer().zeroed())


def _wrap_eval() -> None:
    """Note calls of `eval`, which all end in `train(False)`, also where a library overrides it."""
    original = nn.Module.train

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        seen = observer()
        if mode or seen.quiet or torch.compiler.is_compiling():
            return original(self, mode)
        with seen.guarded():
            seen.eval_calls[self] = here()
        seen.quiet += 1  # modules within it
        try:
            return original(self, mode)
        finally:
            seen.quiet -= 1

    nn.Module.train = train  # type: ignore[method-assign]


def _wrap_clipping() -> None:
    def wrapper_of(original: Callable[..., Any], limit: str) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            seen = observer()
            if seen.quiet or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            values = given.arguments
            parameters = values["parameters"]
            single = isinstance(parameters, Tensor)
            values["parameters"] = parameters = [parameters] if single else list(parameters)
            with seen.guarded():
                seen.clipping(parameters)
            norm = original(*given.args, **given.kwargs)
            with seen.guarded():
                by, power = (
                    "value" if limit == "clip_value" else "norm",
                    values.get("norm_type", 2.0),
                )
                norm_of_all = values.get("total_norm", norm)
                seen.clipped(by=by, norm=norm_of_all, limit=values[limit], power=float(power))
            return norm

        return clip

    for name, limit in CLIPS.items():
        clip = wrapper_of(getattr(torch.nn.utils, name), limit)
        setattr(torch.nn.utils, name, clip)
        if hasattr(torch.nn.utils.clip_grad, name):
            setattr(torch.nn.utils.clip_grad, name, clip)


def _wrap_schedulers() -> None:
    def before(args: Any, _: Any) -> None:
        caller = sys._getframe(2).f_code.co_name  # of the function that `wrap` makes
        observer().scheduled(args[0], caller)

    kinds = [lr_scheduler.LRScheduler]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if "step" in vars(kind):
            wrap(kind, "step", before=before, silences=True)  # schedulers within it


def _wrap_grad_scaler() -> None:
    scaler = torch.amp.GradScaler
    original = scaler.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        seen = observer()
        if _current is None or not self.is_enabled():
            return original(self, outputs)
        seen.window.scale, _current.scaling = True, True
        try:
            return original(self, outputs)
        finally:
            _current.scaling = False

    def unscaled(*_: Any) -> None:
        observer().unscaled()

    def stepping(*_: Any) -> None:
        seen = observer()
        seen.steps_before = sum(seen.optimizers.steps)

    def stepped(*_: Any) -> None:
        seen = observer()
        if sum(seen.optimizers.steps) == seen.steps_before:
            seen.skipped("a GradScaler")

    scaler.scale = scale  # type: ignore[method-assign]
    wrap(scaler, "unscale_", after=unscaled)
    wrap(scaler, "step", before=stepping, after=stepped)


def _wrap_checkpoint() -> None:
    def before(args: Any, kwargs: Any) -> None:
        seen = observer()
        if kwargs.get("use_reentrant") is False or not torch.is_grad_enabled():
            return
        site = here()
        tensors = [a for a in args[1:] if isinstance(a, Tensor)]
        if not any(t.requires_grad for t in tensors) and _may_train(args[0]):
            seen.remark("reentrant", "no input of a reentrant checkpoint requires a gradient", site)

    wrap(torch.utils.checkpoint, "checkpoint", before=before)


def _may_train(function: Any) -> bool:
    """Whether a checkpointed function has parameters to train; true where that is not known."""
    function = getattr(function, "func", function)  # a partial
    owner = getattr(function, "__self__", function)
    return not isinstance(owner, nn.Module) or any(p.requires_grad for p in owner.parameters())


def _wrap_sampler() -> None:
    sampler = torch.utils.data.DistributedSampler
    original = sampler.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        order, seen = original(self), observer()
        if seen.quiet:
            return order
        with seen.guarded():
            drawn = f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}"
            seen.remark("sampler", drawn)
        return seen.passing(self, order, here()) if self.shuffle else order

    sampler.__iter__ = iterate  # type: ignore[method-assign]


def _wrap_cross_entropy() -> None:
    def after(_: Any, args: Any, kwargs: Any) -> None:
        seen = observer()
        if seen.is_looking and torch.is_grad_enabled():
            target: Any = kwargs.get("target", args[1] if len(args) > 1 else None)
            target = model.whole(target)
            counts = target_counts(target, kwargs.get("ignore_index", -100))
            seen.window.new_counts.append([kwargs.get("reduction", "mean"), *counts])

    wrap(nn.functional, "cross_entropy", after=after)


def observe_fsdp() -> None:
    """Install the hooks on `fully_shard` and FSDP: called once, right after their import."""
    if _current is None:
        return
    module: Any = sys.modules["torch.distributed.fsdp"]

    def modules(args: Any, kwargs: Any, position: int) -> list[nn.Module]:
        found = kwargs.get("module", args[position] if len(args) > position else None)
        return [found] if isinstance(found, nn.Module) else list(found or ())

    def wrapping(args: Any, kwargs: Any) -> None:
        if not kwargs.get("sync_module_states"):
            observer().shards.is_known = False
            observer().shards.sharding(modules(args, kwargs, 1))

    def clipping(args: Any, _: Any) -> None:
        observer().clipping(args[0].parameters())

    def clipped(norm: Any, args: Any, kwargs: Any) -> None:
        limit = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
        observer().clipped(by="norm", norm=norm, limit=limit)

    wrap(
        module,
        "fully_shard",
        before=lambda args, kwargs: observer().shards.sharding(modules(args, kwargs, 0)),
        after=lambda _, args, kwargs: observer().shards.sharded(modules(args, kwargs, 0)),
    )
    fsdp = module.FullyShardedDataParallel
    wrap(fsdp, "__init__", before=wrapping)
    wrap(fsdp, "clip_grad_norm_", before=clipping, after=clipped)


def observe_deepspeed() -> None:
    """Install the hooks on DeepSpeed's engine: called once, right after its import."""
    from colotrain.audit import deepspeed

    if _current is not None:
        deepspeed.install(observer)
