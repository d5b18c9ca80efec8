"""Whether ranks that divide a transformers model compute what one process does: by computing both.

A small copy of the model (`huggingface_small`) is run by plain transformers, and then divided, by
as many threads as ranks, with the code that ranks run. The losses and all gradients must agree in
float64; where they do not, the first module whose output differs is named.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ColotrainError, message_of
from colotrain.generators import seeded
from colotrain.models.context_parallel import SequenceShard, divide_sequences_, own_tokens
from colotrain.models.facts import facts_of
from colotrain.models.huggingface_small import LENGTH, VOCABULARY, is_image_text, small_copy
from colotrain.models.tensor_parallel import (
    DIVISIONS,
    TensorShard,
    divide_parameters_,
    part_of,
)
from colotrain.models.tensor_parallel_styles import apply_styles_, partial_parameters
from colotrain.spec.divisions import Divisions, Split

TOLERANCE = 1e-4
"""Of the largest number: modules that compute in float32 differ by 1e-6, faults by about 1."""
LEAST = 1e-6
"""Part of the largest gradient of all that no rounding may exceed."""
WAIT_S = 60.0
MOST_RANKS = 4


class Raised(Exception):
    """An exception of one of several threads."""

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error


class Threads:
    """Collectives among threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def all_gather(self, rank: int, whole: Tensor, own: Tensor) -> None:
        for tensor, part in zip(whole.chunk(self.size), self._exchange(rank, own), strict=True):
            tensor.copy_(part.view_as(tensor))
        self.barrier.wait()

    def reduce_scatter(self, rank: int, own: Tensor, parts: Tensor) -> None:
        given = self._exchange(rank, parts)
        own.zero_()
        for each in given:
            own.add_(each.chunk(self.size)[rank].view_as(own))
        self.barrier.wait()

    def _exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        self.given[rank] = own.detach()
        self.barrier.wait()
        return self.given

    def run(self, function: Callable[[int], None]) -> None:
        """Call `function(rank)` in a thread for each rank; raise `Raised` by the first of them."""
        raised, waited = list[Raised](), list[Raised]()

        def call(rank: int) -> None:
            try:
                function(rank)
            except threading.BrokenBarrierError as error:
                waited.append(Raised(rank, error))
                self.barrier.abort()
            except Exception as error:  # whatever a model raises about its tensors
                raised.append(Raised(rank, error))
                self.barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in (*raised, *waited):  # one that waited in vain tells less than another's error
            raise each


@dataclass(slots=True)
class Watched:
    """The outputs of a model's modules in a forward, in their order, and where it is."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)

    def watch_(self, model: nn.Module) -> None:
        for name, module in module_tree.named_modules(model):
            if not name:
                continue
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(functools.partial(self._leave, name))

    def _enter(self, name: str, *_: Any) -> None:
        self.inside.append(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.inside.pop()
        found = _first_tensor(output)
        if found is not None:
            self.outputs.setdefault(name, found.detach().clone())


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = list(output.values()) if isinstance(output, Mapping) else output
    for value in values if isinstance(values, list | tuple) else ():
        if (found := _first_tensor(value)) is not None:
            return found
    return None


@dataclass(slots=True)
class Whole:
    """What one process computes with plain transformers."""

    loss: float
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor]
    largest: float
    weights: Tensor | None
    """Random factors of its output, whose sum is the loss of all but causal models."""

    def differing(
        self, loss: float, gradients: Mapping[str, Tensor], splits: Mapping[str, Split]
    ) -> str:
        """What differs: the loss, or the gradient that backward computes first; "" for nothing."""
        order = {name: index for index, name in enumerate(self.outputs)}
        found = ""
        for name in sorted(gradients, key=lambda name: order.get(name.rpartition(".")[0], 0)):
            whole = self.gradients[name]
            limit = max(TOLERANCE * float(whole.abs().max()), LEAST * self.largest)
            if name in splits:
                whole = part_of(whole, splits[name])
            if not bool((gradients[name] - whole).abs().max() <= limit):
                found = f"the gradient of {name}"
        return found or ("" if abs(loss - self.loss) <= TOLERANCE * abs(self.loss) else "the loss")


Loss = Callable[..., tuple[Tensor, Tensor]]


def why_matrices_differ(
    model: nn.Module,
    equip: Callable[[nn.Module], None],
    *,
    by_tokens: bool = False,
    predicts_next: bool = True,
) -> str:
    """Why ranks may not divide the matrices of `model` by its plan; "" where they may.

    `equip` gives a plain model of the same class what colotrain gives it before it is divided.
    """
    try:
        plain = small_copy(model)
        divided = copy.deepcopy(plain)
        equip(divided)
        how: Divisions = getattr(divided, DIVISIONS)()
        if how.against:
            return how.against
        if missing := _without_counterpart(model, getattr(model, DIVISIONS)(), divided, how):
            return f"{missing} has no counterpart in the small copy"
        batch = _batch(divided, predicts_next)
        whole = _whole(plain, batch)
        sizes = [ranks for ranks in range(2, MOST_RANKS + 1) if how.allows(ranks)]
        if not sizes:
            return "no number of ranks divides its small copy"
        for ranks in sizes:
            compare = functools.partial(_compare_matrices, divided, how, by_tokens)
            if found := compare(ranks, batch, whole):
                return found
    except ColotrainError as error:
        return error.problem
    return ""


def why_sequences_differ(
    model: nn.Module, equip: Callable[[nn.Module], None], *, predicts_next: bool = True
) -> str:
    """Why two ranks may not divide the samples of `model`; "" where they may."""
    try:
        plain = small_copy(model)
        divided = copy.deepcopy(plain)
        equip(divided)
        batch = _batch(divided, predicts_next)
        return _compare_sequences(divided, batch, _whole(plain, batch))
    except ColotrainError as error:
        return error.problem


def _batch(model: Any, predicts_next: bool) -> dict[str, Tensor]:
    """Samples with targets, or with padding at the end of one."""
    generator = torch.Generator().manual_seed(7)
    ids, labels = torch.randint(2, VOCABULARY - 8, (2, 2, LENGTH), generator=generator).unbind()
    if predicts_next:
        labels[0, :9] = -100  # the first rank's first part has no target
        return {"input_ids": ids, "labels": labels}
    is_padding = torch.zeros_like(ids, dtype=torch.bool)
    is_padding[1, -5:] = True
    batch = {"input_ids": ids.masked_fill(is_padding, getattr(model.config, "pad_token_id", 0))}
    return batch | ({"attention_mask": 1 - is_padding.long()} if facts_of(model).sees_all else {})


def _weights_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Random factors of what a model without a loss of next tokens returns, 0 for padding."""
    found = _first_tensor(output)
    if found is None:
        raise ColotrainError("its small copy returned no tensor")
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    mask = batch.get("attention_mask")
    return weights if mask is None or found.ndim < 3 else weights * mask.unsqueeze(-1)


def _loss_of(model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None) -> Tensor:
    output = model(**{name: tensor.clone() for name, tensor in batch.items()})
    if weights is None:
        loss: Tensor = output[0]
        return loss
    is_whole = facts_of(model).gathers_outputs
    return _weighted(output, weights if is_whole else own_tokens(model, weights))


def _weighted(output: Any, weights: Tensor) -> Tensor:
    found = _first_tensor(output)
    assert found is not None, "it returned a tensor for whole samples"
    return (found * weights).sum()


def _whole(model: Any, batch: dict[str, Tensor]) -> Whole:
    watched = Watched()
    watched.watch_(model)
    try:
        with seeded(5):
            inputs: dict[str, Any] = {n: tensor for n, tensor in batch.items() if n != "labels"}
            if "use_cache" in inspect.signature(model.forward).parameters:
                inputs["use_cache"] = False
            output = model(**inputs)
        weights = None
        if "labels" in batch:
            logits, labels = output.logits.double().flatten(0, 1), batch["labels"].flatten()
            loss = F.cross_entropy(logits, labels, reduction="sum")
        else:
            weights = _weights_of(output, batch)
            loss = _weighted(output, weights)
        loss.backward()
    except ColotrainError:
        raise
    except Exception as error:  # whatever a model raises about sizes that do not fit
        raise ColotrainError(f"its small copy raised {_first_line(error)}") from error
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module_tree.named_parameters(model)
    }
    largest = max(float(each.abs().max()) for each in gradients.values())
    return Whole(loss.item(), gradients, watched.outputs, largest, weights)


def _compare_matrices(
    model: nn.Module,
    how: Divisions,
    by_tokens: bool,
    ranks: int,
    batch: dict[str, Tensor],
    whole: Whole,
) -> str:
    threads, found = Threads(ranks), [Watched() for _ in range(ranks)]
    differing: list[str] = [""] * ranks

    def compute(rank: int) -> None:
        shard = TensorShard(rank=rank, size=ranks, by_tokens=by_tokens)
        shard.all_gather = functools.partial(threads.all_gather, rank)
        shard.reduce_scatter = functools.partial(threads.reduce_scatter, rank)
        own = models[rank]
        splits = divide_parameters_(own, how, shard)
        apply_styles_(own, how, shard)
        partial = partial_parameters(own, how, shard, splits)
        found[rank].watch_(own)
        loss = _loss_of(own, batch, whole.weights)
        loss.backward()
        grads: dict[str, Tensor] = {}
        for name, parameter in module_tree.named_parameters(own):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads[name] = shard.sum(grad) if name in partial else grad
        differing[rank] = whole.differing(loss.item(), grads, splits)

    models = _copies(model, ranks)
    return _outcome(threads, compute, found, differing, whole, lambda rank, tensor: tensor)


def _compare_sequences(model: nn.Module, batch: dict[str, Tensor], whole: Whole) -> str:
    ranks = 2
    threads, found = Threads(ranks), [Watched() for _ in range(ranks)]
    losses, differing = [0.0] * ranks, [""] * ranks
    models = _copies(model, ranks)

    def make_shard(rank: int) -> SequenceShard:
        shard = SequenceShard(rank=rank, size=ranks)
        shard.all_gather = functools.partial(threads.all_gather, rank)
        shard.reduce_scatter = functools.partial(threads.reduce_scatter, rank)
        return shard

    def compute(rank: int) -> None:
        own = models[rank]
        divide_sequences_(own, make_shard(rank))
        found[rank].watch_(own)
        loss = _loss_of(own, batch, whole.weights)
        loss.backward()
        losses[rank] = loss.item()
        threads.barrier.wait()
        sums = {name: torch.zeros_like(p) for name, p in module_tree.named_parameters(own)}
        for model in models:
            for name, parameter in module_tree.named_parameters(model):
                if parameter.grad is not None:
                    sums[name] += parameter.grad
        total = losses[rank] if facts_of(own).gathers_outputs else sum(losses)
        differing[rank] = whole.differing(total, sums, {})

    def own_tokens(rank: int, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != LENGTH:
            return tensor
        shard = make_shard(rank)
        shard.begin(LENGTH)
        rows = torch.cat([torch.arange(*chunk) for chunk in shard.chunks])
        return tensor[:, rows]

    return _outcome(threads, compute, found, differing, whole, own_tokens)


def _outcome(
    threads: Threads,
    compute: Callable[[int], None],
    found: list[Watched],
    differing: list[str],
    whole: Whole,
    part: Callable[[int, Tensor], Tensor],
) -> str:
    """The first thing that differs, by its name; what was raised, with the module it was in."""
    ranks, raised = threads.size, ""
    try:
        with seeded(5):
            threads.run(compute)
    except Raised as error:
        inside = found[error.rank].inside
        what = f"raised {_first_line(error.error)}"
        if isinstance(error.error, threading.BrokenBarrierError):
            what = "waits for ranks that exchange something else"
        raised = f"{inside[-1] if inside else 'the model'} {what}"
    if not raised and not any(differing):
        return ""
    for rank, watched in enumerate(found):
        for name, output in watched.outputs.items():
            wanted = whole.outputs.get(name)
            wanted = None if wanted is None else part(rank, wanted)
            if wanted is None or wanted.shape != output.shape or wanted.ndim < 2:
                continue
            if not bool((output - wanted).abs().max() <= TOLERANCE * wanted.abs().max()):
                return f"{name} differs from one process on {ranks} ranks"
    return raised or f"{next(filter(None, differing))} differs from one process on {ranks} ranks"


def _first_line(error: Exception) -> str:
    return message_of(error).partition("\n")[0]


def _copies(model: nn.Module, ranks: int) -> list[nn.Module]:
    return [copy.deepcopy(model) for _ in range(ranks)]


def _without_counterpart(
    model: nn.Module, how: Divisions, small: nn.Module, of_small: Divisions
) -> str:
    """Name of a module of `model` that the small copy has not, with the same style; "" for none.

    Of an image-text model those of its decoder are looked at.
    """
    known = {kind for _, kind in _kinds(small, of_small, of_decoder=is_image_text(model))}
    kinds = _kinds(model, how, of_decoder=is_image_text(model))
    return next((name for name, kind in kinds if kind not in known), "")


def _kinds(
    model: Any, how: Divisions, *, of_decoder: bool
) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the modules' names, and what they are: place within the layers, class and style."""
    decoder, prefix = model.get_decoder() if of_decoder else model, ""
    if of_decoder:
        name = next(n for n, m in module_tree.named_modules(model) if m is decoder)
        prefix = f"{name}." if name else ""
    for name, module in module_tree.named_modules(decoder):
        style = next((s for g, s in how.styles.items() if fnmatchcase(prefix + name, g)), "")
        place = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        yield prefix + name, (place, type(module).__name__, style)
