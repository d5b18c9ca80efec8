"""What each rank holds of a run's state, and which part of the whole it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import generators, module_tree
from colotrain.engine.comms.raw_bytes import checksum
from colotrain.engine.model.freezing import unfrozen_later
from colotrain.engine.parts.part_map import Part, local_part
from colotrain.engine.sharding.sharded_model import ShardedModel, reshard
from colotrain.engine.state import plain_state
from colotrain.engine.state.index import own_name
from colotrain.engine.state.plain_state import PLAIN
from colotrain.engine.state.run_state import Run
from colotrain.engine.state.shard_file import Piece
from colotrain.torch_internals import is_persistent

OPTIM = "optim."
OWN = ("rng.", "rank.")
"""Beginnings of the names of tensors that one rank alone has: generators, differing buffers."""


def pieces_of(run: Run) -> list[Piece]:
    """Return this rank's part of the state after `run.step` steps; all ranks' parts are the whole.

    One rank, chosen by name, writes what several ranks hold alike. All ranks must call.
    """
    tensors = tensors_of(run, unchanged(run))
    trained, buffers = {f"model.{n}" for n in run.optimizer.shards}, buffers_of(run, tensors)
    tensors = _differing_buffers(run, tensors) | tensors
    return [
        Piece(
            part=part,
            local=local_part(tensors[name]),
            must_be_finite=name in trained or name.startswith("optim."),
            lasts=name not in buffers and not name.startswith(OWN),
        )
        for name, part in parts_of(run, tensors).items()
        if part.writes
    ]


def copied_pieces(run: Run, state: Mapping[str, Tensor], parts: Mapping[str, Part]) -> list[Piece]:
    """Return all that this rank holds: `state`, as `held` returns it, and the parts that it is."""
    buffers = buffers_of(run, state)
    return [
        Piece(part=parts[n], local=t, lasts=n not in buffers and not n.startswith(OWN))
        for n, t in state.items()
    ]


def parts_of(run: Run, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return the part of a whole tensor that each tensor of the state is, by its name there."""

    def part_of(name: str, tensor: Tensor) -> Part:
        parameter, is_divided = parameter_in(name), None
        if name.startswith(OPTIM):
            key = name.rpartition(".")[2]
            is_divided = run.optimizer.divides(parameter, key, ndim=tensor.ndim)
        part = run.sharded.parts.part_of(
            name,
            tensor.shape,
            parameter,
            is_sharded=isinstance(tensor, DTensor),
            is_divided=is_divided,
        )
        return replace(part, writes=True) if name.startswith(OWN) else part

    return {name: part_of(name, tensor) for name, tensor in tensors.items()}


def parameter_in(name: str) -> str:
    """Return the parameter (or buffer) that the tensor `name` is, or is the optimizer state of."""
    kind, _, rest = name.removeprefix(PLAIN).partition(".")
    return rest.rpartition(".")[0] if kind == "optim" else rest


def buffers_of(run: Run, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers and of modules' plain state."""
    parameters = {f"model.{name}" for name, _ in module_tree.named_parameters(run.sharded.module)}
    kept = ("model.", f"{PLAIN}model.")
    return [n for n in tensors if n.startswith(kept) and n not in parameters]


def _differing_buffers(run: Run, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return buffers that differ from rank 0's, such as running means over a rank's batches.

    They have names of this rank's own.
    """
    names = buffers_of(run, tensors)
    if not names:
        return {}
    mine = torch.tensor([checksum(tensors[name]) for name in names])
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    differs = [a != b for a, b in zip(mine.tolist(), of_first.tolist(), strict=True)]
    return {own_name(run.rank, n): tensors[n] for n, d in zip(names, differs, strict=True) if d}


def tensors_of(run: Run, skipped: Set[str] = frozenset()) -> dict[str, Tensor]:
    """Return flat name → tensor: parameters, persistent buffers, optimizer and generator states."""
    kept = run.optimizer.kept  # instead of means, which only an evaluation needs
    model = {n: kept.get(n, t) for n, t in model_state(run.sharded) if n not in skipped}
    return _flat(run, model, run.optimizer.state())


def held(run: Run) -> dict[str, Tensor]:
    """Return flat name → what this rank holds of the state, with the names of a checkpoint."""
    # finding the local part of a DTensor takes far longer than looking up a shard
    shards, skipped = run.optimizer.shards, unchanged(run)
    model = {
        name: shards[name] if name in shards else local_part(tensor)
        for name, tensor in model_state(run.sharded)
        if name not in skipped
    }
    return _flat(run, model, run.optimizer.held_state())


def _flat(
    run: Run, model: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    state = {f"model.{name}": tensor for name, tensor in model.items()}
    for name, values in optimizer.items():
        state |= {f"optim.{name}.{key}": value for key, value in values.items()}
    state |= plain_state.encoded(run)
    return state | {f"rng.{run.rank}{n}": t for n, t in generators.states(run.device).items()}


def model_state(sharded: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers. A user's own `state_dict()` may leave some out."""
    reshard(sharded)
    for name, parameter in sharded.named_parameters():
        yield name, parameter.detach()
    yield from persistent_buffers(sharded.module)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and buffer of all that checkpoints and exports have."""
    for path, module in module_tree.named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and is_persistent(module, name):
                yield f"{path}.{name}" if path else name, buffer


def unchanged(run: Run) -> set[str]:
    """Return the parameters that the plan leaves out of checkpoints: those that never train.

    A parameter from an earlier checkpoint is kept, as it may have trained before it was frozen.
    """
    if run.plan.checkpoint.content == "all":
        return set()
    later = unfrozen_later(run.sharded.module, run.plan.freeze)
    return (
        run.sharded.parts.frozen.keys() - set(run.optimizer.parameters) - run.saver.restored - later
    )
