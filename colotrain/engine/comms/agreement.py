"""Checks that all ranks have built the same model and the same data, before sharding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.read.loader import BatchLoader, stack
from colotrain.engine.comms import exchange
from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.errors import UsageError
from colotrain.generators import seeded

NOT_REPRODUCIBLE = "another at each look"
"""Stands for a sample that differs when one rank reads it twice (random augmentation)."""
MOST_POSITIONS = 256
"""Positions in the order of the samples that are compared."""
FIRST = "the first sample"
"""Names what is read of a stream, which may have divided itself among the ranks."""


def check_alike(model: nn.Module, data: Mapping[str, BatchLoader | None], *, seed: int) -> None:
    """Raise `UsageError` on every rank where ranks differ in what they built.

    All ranks must call. `data` is the loader of each split.
    """
    if dist.get_world_size() == 1:
        return
    own = dict(describe_model(model))
    for split, loader in data.items():
        if loader is not None:
            own |= describe_data(split, loader, seed=seed)
    if _are_equal(own):
        return
    for split, loader in data.items():  # a sample may take seconds: read again only if ranks differ
        if loader is not None:
            again = dict(describe_data(split, loader, seed=seed))
            own |= {k: v if own[k] == v else NOT_REPRODUCIBLE for k, v in again.items()}
    _compare(own)


def check_filled_alike(model: nn.Module) -> None:
    """Check the buffers of a model that was built without values and has them now."""
    if dist.get_world_size() > 1:
        _compare(dict(_describe_buffers(model)))


def _are_equal(own: dict[str, str]) -> bool:
    """Whether all ranks have the same descriptions. All ranks must call."""
    digest = xxhash.xxh3_64_intdigest(repr(own).encode()) >> 1
    ends = torch.tensor([digest, -digest])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return ends[0].item() == -ends[1].item()


def _compare(own: dict[str, str]) -> None:
    if _are_equal(own):
        return
    difference = _difference(exchange.all_gather(own))
    fix = (
        "build the same everywhere: draw from the global generators of torch, random or numpy, "
        "which are seeded, and not from the rank, the time or the host"
    )
    if FIRST in difference:
        fix += "; yield all samples on every rank, of which it trains on its own"
    raise UsageError(difference, fix)


def describe_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a description of each parameter and buffer, with a digest of values that it has."""
    yield (
        "the model's parameters",
        ", ".join(name for name, _ in module_tree.named_parameters(model)),
    )
    for name, parameter in module_tree.named_parameters(model):
        trains = "trained" if parameter.requires_grad else "frozen"
        yield f"parameter {name}", f"{_describe(parameter)} {trains}"
    if not any(parameter.is_meta for parameter in module_tree.parameters(model)):
        yield from _describe_buffers(model)  # otherwise init_weights() may still fill them


def _describe_buffers(model: nn.Module) -> Iterator[tuple[str, str]]:
    return (
        (f"buffer {name}", _describe(buffer)) for name, buffer in module_tree.named_buffers(model)
    )


def describe_data(split: str, loader: BatchLoader, *, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the number of samples, their order and three of them; of a stream, the first sample."""
    count = len(loader.samples)
    if count == sys.maxsize:
        yield f"{FIRST} of the {split} stream", _describe_sample(loader, 0, seed)
        return
    yield f"the length of the {split} data", str(count)
    first = loader.order.samples_at(range(min(count, MOST_POSITIONS)))
    yield f"the order of the {split} data", xxhash.xxh3_64_hexdigest(repr(first).encode())
    for index in sorted({0, count // 2, count - 1}):
        yield f"sample {index} of the {split} data", _describe_sample(loader, index, seed)


def _describe_sample(loader: BatchLoader, index: int, seed: int) -> str:
    with seeded(seed):
        batch = stack([(index, loader.samples[index])], loader.collate)
    return ", ".join(f"{name}: {_describe(value)}" for name, value in sorted(batch.items()))


def _describe(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return kind if tensor.is_meta else f"{kind} with values {digest_of(tensor)}"


def digest_of(tensor: Tensor) -> str:
    """Return a digest that differs (almost surely) when a value or the order of values does."""
    return xxhash.xxh3_64_hexdigest(bytes_of(tensor.cpu()))


def _difference(everyone: list[dict[str, str]]) -> str:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in dict.fromkeys((*first, *other)):
            mine, theirs = first.get(name, "absent"), other.get(name, "absent")
            if mine != theirs:
                return f"ranks 0 and {rank} built something else: {name} is {mine}, and {theirs}"
    raise AssertionError("digests differ only where descriptions do")
