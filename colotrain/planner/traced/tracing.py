"""Tracing a micro-batch's memory and computation by running it once on the meta device.

Every operation of forward and backward is seen, and every storage is tracked from its allocation
to its end. So the tensors that autograd saves are observed, not guessed, for any model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from colotrain import module_tree
from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.engine.model.model_blocks import find_blocks
from colotrain.engine.model.precision import cast_dtype, cast_of, keep_statistics_exact_
from colotrain.errors import UsageError, message_of
from colotrain.models.loss import computing_as
from colotrain.models.objective import as_global_batch, output_of
from colotrain.models.outputs import loss_in, pair_in
from colotrain.planner.traced.kernels import kernels_of
from colotrain.spec.plan import Recompute
from colotrain.spec.survey import Segment, Trace, Work
from colotrain.torch_internals import (
    TorchDispatchMode,
    arguments_of,
    pytree,
    storage_id,
    without_modes,
)

Batch = dict[str, Tensor]


REPEATED: dict[Recompute, float] = {"none": 0.0, "full": 1.0, "selective": 3.5}
"""Relative overhead per operation that backward repeats: Python packs and unpacks saved tensors,
and `selective` adds a torch mode (3.5 times as much, measured on CPU with tiny blocks)."""


class NotTraceable(Exception):
    """Reason why a model's forward or backward could not be traced."""


def trace(
    model: nn.Module,
    sample: Batch,
    *,
    precision: str,
    checkpointing: Recompute,
    device: str,
    micro_batch: int,
) -> Trace:
    """Trace a micro-batch through `model`, which is modified and must not be used afterwards.

    The model must be on the meta device, frozen as in training. `sample` are the tensors of one
    sample, without batch dimension; `device` is the one of the run. Raises `NotTraceable` where
    forward or backward needs values, `UsageError` where the model cannot be trained this way.
    """
    if compute := cast_dtype(precision):
        keep_statistics_exact_(model)
        for parameter in module_tree.parameters(model):
            if parameter.ndim and parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)  # as the all-gather casts it
    for _, block in find_blocks(model):
        block.forward = _on_meta(block.forward)
    checkpoint_blocks_(model, checkpointing)
    batch = {}
    for name, tensor in sample.items():
        dtype = compute if cast_of(name, tensor, compute) else tensor.dtype
        batch[name] = torch.empty((micro_batch, *tensor.shape), dtype=dtype, device="meta")
    try:
        with kernels_of(device), computing_as(device), torch.device("meta"):
            whole = as_global_batch(model, batch)
    except Exception as error:  # any error of a forward that needs values
        raise NotTraceable(f"{type(error).__name__}: {message_of(error)}") from error
    shared = sum(t.numel() * t.element_size() for n, t in whole.items() if n not in batch)
    recording = record(model, whole, device=device, repeated=REPEATED[checkpointing])
    return replace(read(recording, model, whole), row_bytes=shared / micro_batch)


@dataclass(slots=True)
class Storages:
    """Sizes of the storages of one recording, and which of them are gradients."""

    sizes: list[int] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    """Storage that is a parameter's gradient → the parameter's block."""


@dataclass(slots=True)
class Stretch:
    phase: str
    block: str
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Allocations and frees in their order, as pairs (storage, 1 or -1)."""
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: int = 0
    num_repeated: float = 0.0
    reduced: bool = True


class Recording(TorchDispatchMode):
    """Tracks every storage and counts computation, separately for each `Stretch`."""

    def __init__(self, known: list[Tensor], *, repeated: float) -> None:
        super().__init__()
        self.repeated = repeated
        self.stretches = [Stretch("forward", "")]
        self.storages = Storages()
        self.seen: dict[int, int] = {storage_id(t): -1 for t in known}

    def begin(self, phase: str, block: str) -> None:
        self.stretches.append(Stretch(phase, block))

    @property
    def now(self) -> Stretch:
        return self.stretches[-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _without_constants(args, kwargs or {})
        out = func(*args, **kwargs)
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in outputs:
            self._follow(tensor)
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self._count(func, args, kwargs, out, outputs)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self.seen:
            return
        number = len(self.storages.sizes)
        self.storages.sizes.append(storage.nbytes())
        self.seen[key] = number
        self.now.changes.append((number, 1))
        weakref.finalize(storage, self._end, key, number)

    def _end(self, key: int, number: int) -> None:
        if self.seen.get(key) == number:
            del self.seen[key]
        self.now.changes.append((number, -1))

    def number_of(self, tensor: Tensor) -> int:
        return self.seen.get(storage_id(tensor), -1)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        now = self.now
        now.num_ops += 1
        if now.phase == "backward" and torch.is_grad_enabled():
            now.num_repeated += self.repeated
        counted = count_flops(func, args, kwargs, out)
        if counted is not None:
            now.matmul_flops += counted.matmul
            now.attention_flops += counted.attention
            return
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        now.moved_bytes += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))


def _without_constants(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments that are all on the meta device if one of them is.

    What the user's module made when it was imported has values: a table, weights of classes.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if len({t.is_meta for t in tensors}) < 2:
        return args, kwargs
    moved: tuple[Any, Any] = pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )
    return moved


def record(model: nn.Module, batch: Batch, *, device: str, repeated: float = 0.0) -> Recording:
    """Record forward and backward of one micro-batch; of a model that is frozen whole, forward."""
    known = [*module_tree.parameters(model), *module_tree.buffers(model), *batch.values()]
    recording = Recording(known, repeated=repeated)
    handles = list(_mark_blocks(model, recording))
    try:
        with kernels_of(device), recording, computing_as(device):
            with next(iter(batch.values())).device:
                loss = loss_of(output_of(model, batch))
            if any(parameter.requires_grad for parameter in module_tree.parameters(model)):
                recording.begin("backward", "")
                (loss * 1.0).backward()  # without function modes: see _on_meta
            del loss
        for parameter in module_tree.parameters(model):
            parameter.grad = None
    except UsageError:
        raise
    except Exception as error:  # any error of a forward that needs values
        raise NotTraceable(f"{type(error).__name__}: {message_of(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return recording


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns (see `engine.gradients.accumulation.weighted_loss`)."""
    pair = pair_in(output)
    loss: Tensor = loss_in(output) if pair is None else pair[0]
    return loss.reshape(())


def _mark_blocks(model: nn.Module, recording: Recording) -> Iterator[Any]:
    """Register hooks that begin a stretch where `fully_shard`'s hooks of a block would run."""
    owners = {p: name for name, block in find_blocks(model) for p in module_tree.parameters(block)}
    for parameter in module_tree.parameters(model):
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(
                lambda p: _note_gradient(recording, p, owners.get(p, ""))
            )
    for name, block in find_blocks(model):
        yield block.register_forward_pre_hook(_before(recording, name), with_kwargs=True)
        yield block.register_forward_hook(_after(recording, name))


def _note_gradient(recording: Recording, parameter: Tensor, owner: str) -> None:
    number = recording.number_of(parameter.grad) if parameter.grad is not None else -1
    if number >= 0:
        recording.storages.owners[number] = owner


def _before(recording: Recording, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        grown = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if grown:
            marked = _BackwardEnds.apply(recording, *(flat[i] for i in grown))
            for index, tensor in zip(grown, marked, strict=True):
                flat[index] = tensor
        recording.begin("forward", name)
        return pytree.tree_unflatten(flat, spec)

    return hook


def _after(recording: Recording, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        recording.begin("forward", "")
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: _begin_backward(recording, name))

    return hook


def _begin_backward(recording: Recording, name: str) -> None:
    if recording.now.block != name:
        if recording.now.block:
            recording.now.reduced = False
        recording.begin("backward", name)


class _BackwardEnds(torch.autograd.Function):
    """Passes tensors through; its backward runs when the gradients of a block's inputs are done."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.recording.begin("backward", "")
        return None, *grads


def _on_meta(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` so that its tensors are on the meta device also when backward recomputes it.

    Backward runs without function modes, of which a device's context is one.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return forward(*args, **kwargs)

    return wrapped


def read(recording: Recording, model: nn.Module, batch: Batch) -> Trace:
    """Convert a recording to a `Trace`."""
    segments = tuple(
        Segment(
            phase=stretch.phase,  # type: ignore[arg-type]
            block=stretch.block,
            events=tuple(n if sign > 0 else -1 - n for n, sign in stretch.changes),
            work=Work(
                matmul_flops=stretch.matmul_flops,
                attention_flops=stretch.attention_flops,
                moved_bytes=stretch.moved_bytes,
                num_ops=stretch.num_ops,
                num_repeated=stretch.num_repeated,
            ),
            reduced=stretch.reduced,
        )
        for stretch in recording.stretches
    )
    return Trace(
        segments=segments,
        storages=tuple(recording.storages.sizes),
        gradients=recording.storages.owners,
        buffer_bytes=sum(b.numel() * b.element_size() for b in module_tree.buffers(model)),
        input_bytes=sum(t.numel() * t.element_size() for t in batch.values()),
    )


ATTENTION = ("attention", "sdpa", "varlen_attn")
"""Words in the names of attention's operations."""


class Flops(NamedTuple):
    """FLOPs of one operation."""

    matmul: float = 0.0
    attention: float = 0.0


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> Flops | None:
    """Return the FLOPs of a matmul, a convolution or an attention; None of anything else.

    torch's formulas count all pairs of a query and a key. Of causal attention half of them count
    here, for its kernels pass over the blocks that are masked whole.
    """
    formula: Any = flop_registry.get(func.overloadpacket) or flop_registry.get(func)
    formula = formula or NOT_IN_TORCH.get(str(func.overloadpacket))
    if formula is None:
        return None
    if not any(word in str(func) for word in ATTENTION):
        return Flops(matmul=formula(*args, **kwargs, out_val=out))
    names = [argument.name for argument in arguments_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    heads = 1 if "scaled_dot_product" in str(func) else -2
    for name in ("key", "value"):
        given[name] = _for_every_head(given[name], given["query"], heads)
    positional = [given[name] for name, _ in zip(names, args, strict=False)]
    flops = formula(*positional, **{name: given[name] for name in kwargs}, out_val=out)
    return Flops(attention=flops / 2 if given.get("is_causal") else flops)


def _for_every_head(key: Tensor, query: Tensor, dim: int) -> Tensor:
    """Keys or values as if each head had its own: up to torch 2.12 formulas refuse fewer."""
    sizes = list(key.shape)
    sizes[dim] = query.shape[dim]
    with without_modes():
        return torch.empty(sizes, dtype=key.dtype, device="meta")


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


IN_TORCH: dict[str, Any] = {str(operation): formula for operation, formula in flop_registry.items()}
NOT_IN_TORCH = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_on_cpu_backward,
    "torch_attn._varlen_attn": IN_TORCH["aten._flash_attention_forward"],
    "torch_attn._varlen_attn_backward": IN_TORCH["aten._flash_attention_backward"],
}
"""FLOP formulas of operations that torch's own counter lacks (those of documents up to 2.12)."""
