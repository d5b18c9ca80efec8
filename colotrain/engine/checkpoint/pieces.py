"""What each rank holds of a run's state, and which part of the whole it is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine import generators
from colotrain.engine.checkpoint import plain_state
from colotrain.engine.checkpoint.parts import named_in, parameter_of
from colotrain.engine.checkpoint.plain_state import PLAIN
from colotrain.engine.checkpoint.shard_file import Piece
from colotrain.engine.freezing import unfrozen_later
from colotrain.engine.guard import checksum
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.sharded_model import ShardedModel, reshard
from colotrain.engine.sharding.shards import begin_of, local_shard
from colotrain.spec.axes import DP_REPLICATE, TP
from colotrain.torch_internals import is_persistent


def pieces_of(run: Run) -> list[Piece]:
    """Return this rank's part of the state after `run.step` steps; all ranks' parts are the whole.

    One rank, chosen by name, writes what several ranks hold alike. All ranks must call.
    """
    tensors = tensors_of(run, unchanged(run))
    differing = [
        Piece(name=own_name(run, name), local=tensors[name], shape=tuple(tensors[name].shape))
        for name in _differing_buffers(run, tensors)
    ]
    return [*differing, *written_here(run, tensors)]


def written_here(run: Run, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the pieces of `tensors` that this rank writes, without buffers that differ."""
    found: list[Piece] = []
    trained = {f"model.{name}" for name in run.optimizer.shards}
    buffers, comms = buffers_of(run, tensors), run.sharded.comms
    parts, stage = run.sharded.parts, run.sharded.stage
    for name, tensor in tensors.items():
        if not stage.counts(named_in(name)):
            continue
        owner = parameter_of(name, parts)
        piece = Piece(
            name=name,
            local=tensor,
            shape=tuple(tensor.shape) if owner is None else parts.whole_shape(owner, tensor.shape),
            must_be_finite=name in trained or name.startswith("optim."),
            lasts=name not in buffers and not name.startswith("rng."),
        )
        if not isinstance(tensor, DTensor):
            if name.startswith("rng.") or stage.writes(named_in(name)):
                found.append(piece)
            continue
        local = local_shard(tensor)
        # all ranks of a tensor-parallel group hold what is no parameter's
        alike = (DP_REPLICATE, TP) if owner is None else (DP_REPLICATE,)
        writer = zlib.crc32(name.encode()) % comms.ranks.size(*alike)
        if local.numel() and writer == comms.ranks.index(comms.rank, *alike):
            begin = begin_of(owner or name, tensor, parts)
            found.append(replace(piece, local=local, begin=begin))
    return found


def own_name(run: Run, name: str) -> str:
    """Return the name of a tensor of this rank that differs from rank 0's (the plain name)."""
    return f"rank.{run.rank}.{name}"


def buffers_of(run: Run, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers and of modules' plain state."""
    parameters = {f"model.{name}" for name, _ in module_tree.named_parameters(run.sharded.module)}
    kept = ("model.", f"{PLAIN}model.")
    return [n for n in tensors if n.startswith(kept) and n not in parameters]


def _differing_buffers(run: Run, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return buffers that differ from rank 0's, such as running means over a rank's batches."""
    names = buffers_of(run, tensors)
    if not names:
        return []
    mine = torch.tensor([checksum(tensors[name]) for name in names])
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    return [n for n, a, b in zip(names, mine.tolist(), of_first.tolist(), strict=True) if a != b]


def tensors_of(run: Run, skipped: Set[str] = frozenset()) -> dict[str, Tensor]:
    """Return flat name → tensor: parameters, persistent buffers, optimizer and generator states."""
    state = {f"model.{n}": t for n, t in model_state(run.sharded) if n not in skipped}
    for name, values in run.optimizer.state().items():
        state |= {f"optim.{name}.{key}": value for key, value in values.items()}
    state |= plain_state.encoded(run)
    return state | {f"rng.{run.rank}{n}": t for n, t in generators.states(run.device).items()}


def model_state(sharded: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers. A user's own `state_dict()` may leave some out."""
    reshard(sharded)
    for name, parameter in sharded.named_parameters():
        yield name, parameter.detach()
    for path, module in module_tree.named_modules(sharded.module):
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
    return set(run.gradients.frozen) - set(run.optimizer.parameters) - run.restored - later
