"""One stage of a model: the blocks that this rank keeps, and what stands for the others.

The model keeps all its modules and names. Parameters of other stages stay on the meta device for
good. A block of an earlier stage passes on what it is given, and a module before the first block
gives zeros of the right shape, which this stage's first block replaces by what the stage before has
sent. Forward ends with the stage's last block, unless that is the model's last.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colotrain.engine.model_blocks import Group
from colotrain.engine.pipeline.exchange import Exchange, make_links
from colotrain.engine.waiting import waiting
from colotrain.spec.mesh import PP
from colotrain.spec.sequence import BlockSequence
from colotrain.torch_internals import pytree, wait_as_long_as_all_


class _Left(Exception):
    """Ends a forward after the stage's last block."""

    def __init__(self, activations: Tensor) -> None:
        super().__init__()
        self.activations = activations


@dataclass(frozen=True, slots=True)
class Passed:
    """A micro-batch between its forward and its backward on this stage."""

    output: Tensor
    """The loss to differentiate, or the activations that the next stage got."""
    received: Tensor | None
    """The activations that the stage before sent."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The part of the model that this rank holds. By default that is all of it."""

    index: int = 0
    count: int = 1
    sequence: BlockSequence = field(default_factory=BlockSequence)
    split: tuple[int, ...] = (1,)
    """Number of blocks of each stage."""
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter → stages that hold it; all parameters of the model, where there are stages."""
    group: dist.ProcessGroup | None = None
    """The ranks of this stage; None: all ranks."""
    line: dist.ProcessGroup | None = None
    """The ranks that hold the same part as this one, of each stage."""
    exchange: Exchange | None = None
    compute_dtype: torch.dtype | None = None
    received: Tensor | None = None
    trains_before: bool = False
    """Whether parameters of earlier stages train, so that they need the gradient."""
    trains_here: bool = True
    """Whether parameters of this stage train."""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def ahead(self) -> int:
        """Forwards that run before the first backward (1F1B): one per later stage."""
        return self.count - 1 - self.index

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first of the stage's ranks, which writes what all of them hold."""
        return dist.get_rank() == 0 if self.group is None else self.group.rank() == 0

    def holds(self, name: str) -> bool:
        return self.index in self.holders.get(name, (self.index,))

    def counts(self, name: str) -> bool:
        """Whether what this stage holds of a parameter counts in sums over all stages."""
        return self.holders.get(name, (self.index,))[0] == self.index

    def writes(self, name: str) -> bool:
        """Whether this rank writes what every rank of the stage holds alike of a tensor.

        What is no parameter is on all stages; rank 0 writes it.
        """
        return self.is_first_rank and self.index == self.holders.get(name, (0,))[0]

    @property
    def shared(self) -> list[str]:
        """Names of the (tied) parameters that this stage and another one hold."""
        holders = self.holders.items()
        return [name for name, stages in holders if len(stages) > 1 and self.index in stages]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of this stage's blocks."""
        begin = sum(self.split[: self.index])
        return self.sequence.blocks[begin : begin + self.split[self.index]]

    @property
    def activation_bytes(self) -> int:
        """Bytes that a micro-batch, such as that of the trial, sends on to the next stage."""
        own = self.sequence.activation_itemsize
        itemsize = self.compute_dtype.itemsize if self.compute_dtype is not None else own
        return self.sequence.activation_numel * itemsize

    @property
    def earlier_blocks(self) -> tuple[str, ...]:
        return self.sequence.blocks[: sum(self.split[: self.index])]

    def begin_step(self, frozen: Mapping[str, str]) -> None:
        """Note which stages train in this step."""
        trained = [stages for name, stages in self.holders.items() if name not in frozen]
        if self.count > 1:
            self.trains_before = any(stages[0] < self.index for stages in trained)
            self.trains_here = any(self.index in stages for stages in trained)

    def forward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Run a micro-batch through a stage that is not the last, and send its activations on."""
        activations: Tensor = model(**inputs)
        assert self.exchange is not None
        self.exchange.send_activations(activations)
        return activations

    def backward(self, passed: Passed) -> None:
        """Differentiate a micro-batch; its gradient comes from, and goes on to, other stages."""
        if self.count == 1:
            passed.output.backward()
            return
        assert self.exchange is not None
        gradient = None
        if not self.is_last and (self.trains_before or self.trains_here):
            gradient = self.exchange.receive_gradient(passed.output)
        if passed.output.requires_grad:
            torch.autograd.backward(passed.output, gradient)
        if self.index and self.trains_before:
            assert passed.received is not None
            unused = passed.received.grad is None
            own = torch.zeros_like(passed.received) if unused else passed.received.grad
            self.exchange.send_gradient(cast(Tensor, own))

    def end_step(self) -> None:
        if self.exchange is not None:
            self.exchange.finish()

    def from_holder(self, name: str, own: Tensor) -> Tensor:
        """Return `own` of the first stage that holds a parameter, laid out like `own` here.

        The ranks of the same part on all stages must call.
        """
        if self.line is None:
            return own
        value = own.contiguous()
        dist.broadcast(value, group=self.line, group_src=self.holders[name][0])
        return value

    def from_last(self, flag: bool) -> bool:
        """Return the last stage's flag. All ranks must call."""
        if self.line is None:
            return flag
        told = torch.tensor(int(flag))
        dist.broadcast(told, group=self.line, group_src=self.count - 1)
        return bool(told.item())

    def sum_shared_(self, name: str, gradient: Tensor) -> None:
        """Add the other stage's gradient of a tied parameter; both then have the same bits.

        All ranks of the first and the last stage must call.
        """
        assert self.exchange is not None
        assert self.holders[name] == (0, self.count - 1), "only ends of the model share parameters"
        group, peer = self.exchange.forward, self.count - 1 - self.index
        other = torch.empty_like(gradient)
        both = (dist.isend, gradient.contiguous()), (dist.irecv, other)
        ops = [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, tensor in both]
        with waiting():
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        gradient.add_(other)

    def connect_(self, mesh: DeviceMesh) -> None:
        """Make the groups of a mesh whose first axis is that of the stages. All ranks must call."""
        ranks = mesh.mesh.reshape(self.count, -1)
        for stage in ranks.tolist():
            group = dist.new_group(stage)
            if dist.get_rank() in stage:
                self.group = group
        lines, forward, links = ranks.T.tolist(), mesh.get_group(PP), {}
        if mesh.device_type == "cpu":
            pairs = [pair for line in lines for pair in itertools.pairwise(line)]
            links = make_links(pairs, self.activation_bytes)
        for line in lines:
            group = dist.new_group(line)
            if dist.get_rank() in line:
                of_stage = {line.index(rank): link for rank, link in links.items()}
                self.line, self.exchange = forward, Exchange(forward, group, of_stage)
        for group in (self.group, forward, self.exchange.backward if self.exchange else forward):
            assert group is not None
            wait_as_long_as_all_(group)

    def own_groups(self, model: nn.Module, groups: Sequence[Group]) -> list[Group]:
        """Return the groups, of which the modules of other stages are left out."""
        if self.count == 1:
            return list(groups)
        path_of = {module: path for path, module in model.named_modules()}
        held = {p for name, p in model.named_parameters() if self.holds(name)}
        own = [[m for m in modules if held & {*m.parameters()}] for _, modules in groups]
        return [(path_of[modules[0]], modules) for modules in own if modules]

    def install_(self, model: nn.Module) -> None:
        """Let the stage's ends exchange. Call it after `fully_shard`, whose hooks run inside."""
        if self.index:
            first = model.get_submodule(self.blocks[0])
            first.register_forward_pre_hook(self._receive, prepend=True, with_kwargs=True)
        if not self.is_last:
            model.get_submodule(self.blocks[-1]).register_forward_hook(self._leave)

    def _receive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self.exchange is not None
        like = args[0].to(self.compute_dtype or args[0].dtype)
        self.received = self.exchange.receive_activations(like)
        self.received.requires_grad_(self.trains_before and torch.is_grad_enabled())
        return (self.received, *args[1:]), kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        activations = output[0] if isinstance(output, tuple) else output
        raise _Left(activations.to(self.compute_dtype or activations.dtype))


def keep_stage_(
    model: nn.Module,
    sequence: BlockSequence,
    split: tuple[int, ...],
    index: int,
    *,
    compute_dtype: torch.dtype | None,
) -> Stage:
    """Leave one stage of `model`: parameters of others are on the meta device afterwards."""
    stage = Stage(
        index=index, count=len(split), sequence=sequence, split=split, compute_dtype=compute_dtype
    )
    stage.holders = {n: sequence.stages_of(n, split) for n, _ in model.named_parameters()}
    _to_meta_(model, stage)
    returned = dict(zip(sequence.blocks, sequence.num_returned, strict=True))
    for name in stage.earlier_blocks:
        model.get_submodule(name).forward = functools.partial(_pass_on, returned[name])
    if index:
        held = {p for name, p in model.named_parameters() if stage.holds(name)}
        for path in dict.fromkeys(name.rpartition(".")[0] for name in sequence.before):
            module = model.get_submodule(path)
            if not held & {*module.parameters()}:
                module.forward = _only_shape(module, compute_dtype)
    if not stage.is_last:
        model.forward = _until_left(model.forward)
    return stage


def _to_meta_(model: nn.Module, stage: Stage) -> None:
    """Free the parameters of other stages that were built with values."""
    freed: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters()):
        if not stage.holds(name) and not parameter.is_meta:
            freed[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for module in model.modules() if freed else ():
        for key, own in module._parameters.items():
            if own is not None and own in freed:
                module._parameters[key] = freed[own]


def _pass_on(num_returned: int, activations: Tensor, *_: Any, **__: Any) -> Any:
    return (activations, *[None] * (num_returned - 1)) if num_returned else activations


def _only_shape(module: nn.Module, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a forward that gives zeros of the shapes that the module's own gives.

    That of an embedding, which may exchange with other ranks, does not run.
    """
    forward = module.forward
    if isinstance(module, nn.Embedding):
        weight, width = module.weight, module.embedding_dim

        def forward(ids: Tensor) -> Tensor:
            return torch.empty((*ids.shape, width), dtype=weight.dtype, device="meta")

    @functools.wraps(forward)
    def zeros(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        shaped = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))

        def real(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() and dtype is not None
            made = torch.zeros((), dtype=dtype if floating else tensor.dtype)
            return made.to(given[0].device).expand(tensor.shape)

        with torch.no_grad():
            return pytree.tree_map_only(Tensor, real, forward(*shaped[0], **shaped[1]))

    return zeros


def _until_left(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def until_left(*args: Any, **kwargs: Any) -> Tensor:
        try:
            forward(*args, **kwargs)
        except _Left as left:
            return left.activations
        raise AssertionError("forward went on after the stage's last block")

    return until_left
