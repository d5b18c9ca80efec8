"""One stage of a model: the blocks that this rank keeps, and what stands for the others.

The model keeps all its modules and names. Parameters of other stages stay on the meta device for
good. A block of another stage passes on what it is given, and a module before the first block gives
zeros of the right shape, which this stage's first block replaces by what the stage before has sent.
Forward ends with the stage's last block, unless that is the model's last.

A stage may have several chunks of consecutive blocks, with those of other stages in between. Then a
forward runs one chunk: the other chunks' blocks pass on what they are given, too, and their hooks
do not run, so that `fully_shard` neither gathers nor reduces them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.comms import exchange
from colotrain.engine.comms.groups import Groups
from colotrain.engine.comms.waiting import waiting
from colotrain.engine.model.model_blocks import Group
from colotrain.engine.pipeline.exchange import Exchange, make_links
from colotrain.models.facts import facts_of
from colotrain.models.tensor_parallel import ATTRIBUTE
from colotrain.spec.axes import PP
from colotrain.spec.pipeline_schedule import Action, order_of, slots_around
from colotrain.spec.sequence import BlockSequence
from colotrain.torch_internals import call_instead_, pytree


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
    """Number of blocks of each stage, or of each of the `count` · `chunks` chunks of the model."""
    chunks: int = 1
    """Chunks that each stage has: this one's are every `count`-th of the model."""
    chunk: int = 0
    """Which of its chunks a forward runs."""
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter → stages that hold it; all parameters of the model, where there are stages."""
    line: dist.ProcessGroup | None = None
    """The ranks that hold the same part as this one, of each stage."""
    exchange: Exchange | None = None
    compute_dtype: torch.dtype | None = None
    received: Tensor | None = None
    trains_before: tuple[bool, ...] = (False,)
    """Of each chunk: whether parameters before it train, so that they need the gradient."""
    trains: tuple[bool, ...] = (True,)
    """Of each chunk: whether parameters in or before it train, so that it runs a backward."""
    stand_ins: dict[str, tuple[nn.Module, Callable[..., Any]]] = field(default_factory=dict)
    """Block of this stage → its module, and what is called instead in other chunks' forwards."""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def gives_loss(self, chunk: int) -> bool:
        """Whether the chunk is the model's last."""
        return self.is_last and chunk == self.chunks - 1

    def in_model(self, chunk: int) -> int:
        """Return the position of one of this stage's chunks among all of the model's."""
        return chunk * self.count + self.index

    def order(self, micro_batches: int) -> list[Action]:
        """Return the forwards and backwards of a step in the order in which this rank runs them."""
        return order_of(
            self.index, stages=self.count, chunks=self.chunks, micro_batches=micro_batches
        )

    def holds(self, name: str) -> bool:
        return self.index in self.holders.get(name, (self.index,))

    def blocks_of(self, chunk: int) -> tuple[str, ...]:
        """Return the names of the blocks of one of this stage's chunks."""
        return self.sequence.blocks_of(self.in_model(chunk), self.split)

    def chunk_of(self, path: str) -> int:
        """Return the chunk in whose forward a module of this stage runs.

        What is in no block runs in the model's first chunk on the first stage, and in its last
        chunk on the last: no stage has both.
        """
        for chunk in range(self.chunks if self.count > 1 else 0):
            if any(f"{path}.".startswith(f"{block}.") for block in self.blocks_of(chunk)):
                return chunk
        return 0 if self.index == 0 else self.chunks - 1

    def place_of(self, path: str, stage: int) -> int:
        """Return the position of a module of some stage: that of its chunk among all chunks."""
        mine = replace(self, index=stage)
        return mine.in_model(mine.chunk_of(path))

    @property
    def activation_bytes(self) -> int:
        """Bytes that a micro-batch, such as that of the trial, sends on to the next stage."""
        own = self.sequence.activation_itemsize
        itemsize = self.compute_dtype.itemsize if self.compute_dtype is not None else own
        return self.sequence.activation_numel * itemsize

    def begin_step(self, frozen: Mapping[str, str]) -> None:
        """Note which chunks train in this step."""
        if self.count == 1:
            return
        trained = {
            chunk
            for name in self.holders
            if name not in frozen
            for chunk in self.sequence.chunks_of(name, self.split)
        }
        first, own = min(trained, default=len(self.split)), range(self.chunks)
        self.trains_before = tuple(first < self.in_model(chunk) for chunk in own)
        self.trains = tuple(first <= self.in_model(chunk) for chunk in own)

    def begin_forward(self, chunk: int) -> None:
        """Let the model's forwards run one chunk from now on."""
        self.chunk, self.received = chunk, None
        if self.chunks > 1:
            own = self.blocks_of(chunk)
            for name, (module, act) in self.stand_ins.items():
                call_instead_(module, None if name in own else act)

    def forward(self, model: nn.Module, inputs: Mapping[str, Any], chunk: int = 0) -> Tensor:
        """Run a micro-batch through a chunk that gives no loss, and send its activations on."""
        self.begin_forward(chunk)
        activations: Tensor = model(**inputs)
        assert self.exchange is not None
        self.exchange.send_activations(activations)
        return activations

    def forward_until_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Run a micro-batch through all chunks but the one that gives the loss.

        On the last stage the model's next forward gives it.
        """
        for chunk in range(self.chunks - self.is_last):
            self.forward(model, inputs, chunk)
        if self.is_last:
            self.begin_forward(self.chunks - 1)

    def backward(self, passed: Passed, chunk: int = 0) -> None:
        """Differentiate a micro-batch; its gradient comes from, and goes on to, other stages."""
        if self.count == 1:
            passed.output.backward()
            return
        assert self.exchange is not None
        gradient = None
        if not self.gives_loss(chunk) and self.trains[chunk]:
            gradient = self.exchange.receive_gradient(passed.output)
        if passed.output.requires_grad:
            torch.autograd.backward(passed.output, gradient)
        if self.trains_before[chunk]:
            assert passed.received is not None
            unused = passed.received.grad is None
            own = torch.zeros_like(passed.received) if unused else passed.received.grad
            self.exchange.send_gradient(cast(Tensor, own))

    def end_step(self) -> None:
        if self.exchange is not None:
            self.exchange.finish()

    def from_last(self, value: Any) -> Any:
        """Return the last stage's value, plain data. All ranks must call."""
        if self.line is None:
            return value
        return exchange.broadcast(value, self.line, src=self.count - 1)

    def tensors_from_last(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the last stage's tensors, on the CPU. All ranks must call."""
        if self.line is None:
            return dict(tensors)
        return exchange.broadcast_tensors(tensors, self.line, src=self.count - 1)

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

    def connect_(self, comms: Groups) -> None:
        """Let this stage exchange with its neighbours. All ranks must call."""
        self.line, links = comms[PP], {}
        lines, most_bytes = comms.ranks.groups(PP), self.activation_bytes
        if comms.device == "cpu":
            pairs = [pair for line in lines for pair in itertools.pairwise(line)]
            links = make_links(pairs, most_bytes, comms)
        if comms.device == "cpu" and self.chunks > 1:
            pairs = [(line[-1], line[0]) for line in lines]
            links |= make_links(pairs, most_bytes, comms, slots_around(self.count))
        backward, *around = [comms.another(PP) for _ in range(1 if self.chunks == 1 else 3)]
        of_stage = {comms.ranks.coords(before)[PP]: link for before, link in links.items()}
        self.exchange = Exchange(self.line, backward, of_stage, around=around)

    def own_groups(self, model: nn.Module, groups: Sequence[Group]) -> list[Group]:
        """Return the groups, of which the modules of other stages are left out.

        A group of modules that do not run together is divided by chunks.
        """
        if self.count == 1:
            return list(groups)
        path_of = {module: path for path, module in module_tree.named_modules(model)}
        held = {p for name, p in module_tree.named_parameters(model) if self.holds(name)}
        found: list[Group] = []
        for _, modules in groups:
            together: dict[tuple[int, bool], list[nn.Module]] = {}
            for module in modules:
                if held & {*module_tree.parameters(module)}:
                    together.setdefault(self._runs_with(path_of[module]), []).append(module)
            found += [(path_of[own[0]], own) for own in together.values()]
        return found

    def _runs_with(self, path: str) -> tuple[int, bool]:
        """Return what is equal for modules that run in the same forwards.

        Modules before the first block run in the forwards of all of the first stage's chunks.
        """
        if self.chunks == 1:
            return 0, True
        inside = any(f"{path}.".startswith(f"{block}.") for block in self.sequence.blocks)
        return self.chunk_of(path), inside

    def install_(self, model: nn.Module) -> None:
        """Let the chunks' ends exchange. Call it after `fully_shard`, whose hooks run inside."""
        for chunk in range(self.chunks if self.count > 1 else 0):
            blocks = [model.get_submodule(name) for name in self.blocks_of(chunk)]
            if self.in_model(chunk):
                blocks[0].register_forward_pre_hook(self._receive, prepend=True, with_kwargs=True)
            if not self.gives_loss(chunk):
                blocks[-1].register_forward_hook(self._leave)

    def _receive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self.exchange is not None
        like = args[0].to(self.compute_dtype or args[0].dtype)
        self.received = self.exchange.receive_activations(like)
        self.received.requires_grad_(self.trains_before[self.chunk] and torch.is_grad_enabled())
        return (self.received, *args[1:]), kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        activations = output[0] if isinstance(output, tuple) else output
        raise Left(activations.to(self.compute_dtype or activations.dtype))


def keep_stage_(
    model: nn.Module,
    sequence: BlockSequence,
    split: tuple[int, ...],
    index: int,
    *,
    chunks: int = 1,
    compute_dtype: torch.dtype | None,
) -> Stage:
    """Leave one stage of `model`: parameters of others are on the meta device afterwards.

    `split` has the number of blocks of each chunk, of which each stage has `chunks`.
    """
    stage = Stage(
        index=index,
        count=len(split) // chunks,
        sequence=sequence,
        split=split,
        chunks=chunks,
        compute_dtype=compute_dtype,
        trains_before=(False,) * chunks,
        trains=(True,) * chunks,
    )
    stage.holders = {
        n: sequence.stages_of(n, split, chunks) for n, _ in module_tree.named_parameters(model)
    }
    _to_meta_(model, stage)
    own = {name for chunk in range(chunks) for name in stage.blocks_of(chunk)}
    for name, num_returned in zip(sequence.blocks, sequence.num_returned, strict=True):
        module, act = model.get_submodule(name), functools.partial(pass_on, num_returned)
        if name in own:
            stage.stand_ins[name] = module, act
        else:
            module.forward = act
    if index:
        held = {p for name, p in module_tree.named_parameters(model) if stage.holds(name)}
        for path in dict.fromkeys(name.rpartition(".")[0] for name in sequence.before):
            module = model.get_submodule(path)
            if not held & {*module_tree.parameters(module)}:
                module.forward = only_shape(module, compute_dtype)
    facts_of(model).layers_run = lambda: len(stage.blocks_of(stage.chunk))
    if chunks > 1 or not stage.is_last:
        model.forward = until_left(model.forward, lambda: stage.gives_loss(stage.chunk))
    return stage


def _to_meta_(model: nn.Module, stage: Stage) -> None:
    """Free the parameters of other stages that were built with values."""
    freed: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module_tree.named_parameters(model)):
        if not stage.holds(name) and not parameter.is_meta:
            freed[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for module in module_tree.modules(model) if freed else ():
        for key, own in module._parameters.items():
            if own is not None and own in freed:
                module._parameters[key] = freed[own]


class Left(Exception):
    """Ends a forward after the last block that it runs."""

    def __init__(self, activations: Tensor) -> None:
        super().__init__()
        self.activations = activations


def pass_on(num_returned: int, activations: Tensor, *_: Any, **__: Any) -> Any:
    """Return what a block is given as it returns it: a tensor, or a tuple that begins with it."""
    return (activations, *[None] * (num_returned - 1)) if num_returned else activations


def only_shape(module: nn.Module, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a forward that gives zeros of the shapes that the module's own gives.

    That of an embedding, which may exchange with other ranks, does not run.
    """
    forward = module.forward
    if isinstance(module, nn.Embedding):
        weight, width, shard = module.weight, module.embedding_dim, getattr(module, ATTRIBUTE, None)
        parts = shard.size if shard is not None and shard.by_tokens else 1

        def forward(ids: Tensor) -> Tensor:
            shape = (*ids.shape[:-1], ids.shape[-1] // parts, width)
            return torch.empty(shape, dtype=weight.dtype, device="meta")

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


def until_left(forward: Callable[..., Any], may_end: Callable[[], bool]) -> Callable[..., Any]:
    """Return a forward that gives the activations with which a block has left it.

    It gives its own output where it `may_end` without that.
    """

    @functools.wraps(forward)
    def given(*args: Any, **kwargs: Any) -> Any:
        try:
            output = forward(*args, **kwargs)
        except Left as left:
            return left.activations
        assert may_end(), "forward went on after the chunk's last block"
        return output

    return given
