"""Launchers with copies in their memory, and ranks that are threads of this process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.addresses import LOOPBACK, listen
from colotrain.engine.comms import exchange
from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.state.buddy import Buddy
from colotrain.engine.state.manifest import Manifest
from colotrain.engine.state.memory_copy import MemoryCopies
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.engine.state.shard_file import Piece, State
from colotrain.launch.copy_keeper import CopyKeeper
from colotrain.spec import axes
from colotrain.spec.elastic import CopyPlaces, MemoryCopyPlan

SECRET = "secret"
MANIFEST = Manifest(
    step=3,
    optimizer_steps=3,
    micro_batches=12,
    loss_scale=None,
    clean_steps=0,
    world_size=2,
    plugin="zero3",
    global_batch=8,
    written_at=1.0,
)
WAIT_S = 20.0

T = TypeVar("T")


class Ranks:
    """Collectives among threads, each of which is a rank, in place of torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        self.barrier, self.said = threading.Barrier(1), list[Any]()
        monkeypatch.setattr(dist, "get_rank", lambda: self.here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: self.barrier.parties)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(exchange, "all_gather", self.all_gather)
        monkeypatch.setattr(exchange, "broadcast", self.broadcast)

    def run(self, count: int, body: Callable[[int], T]) -> list[T]:
        """Return what each of `count` ranks returns."""
        self.barrier, self.said = threading.Barrier(count, timeout=WAIT_S), [None] * count
        found: list[Any] = [None] * count
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next(e for e in errors if not isinstance(e, threading.BrokenBarrierError))
        return found

    def exchange(self, mine: Any) -> list[Any]:
        self.said[self.here.rank] = mine
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.exchange(tensor.clone())).sum(0))

    def all_gather(self, mine: Any) -> list[Any]:
        found: list[Any] = json.loads(json.dumps(self.exchange(mine)))
        return found

    def broadcast(self, mine: Any) -> Any:
        return json.loads(json.dumps(self.exchange(mine)[0]))


@dataclass
class Launcher:
    """A host's launcher: the files of its ranks, and what it keeps for those of another one."""

    procs: int
    handles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handles = [os.memfd_create(f"test{n}") for n in range(2 * self.procs)]
        self.keeper = CopyKeeper(listen(LOOPBACK, 0), secret=lambda: SECRET, files=self)  # type: ignore[arg-type]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.keeper.port}"

    def end(self) -> None:
        self.keeper.close()
        for handle in self.handles:
            os.close(handle)

    def copies(self, local_rank: int, *, buddy: str = "", attempt: str = "a") -> MemoryCopies:
        """As a rank of a new attempt has them."""
        places = CopyPlaces(
            launcher=os.getpid(),
            files=(*self.handles, *self.keeper.handles()),
            own=self.address,
            buddy=buddy,
            secret=SECRET,
        )
        own = self.handles[2 * local_rank : 2 * local_rank + 2]
        plan: Any = SimpleNamespace(
            elastic=SimpleNamespace(memory_copy=MemoryCopyPlan(enabled=True)),
            cluster=SimpleNamespace(procs_per_node=self.procs),
        )
        return MemoryCopies(
            plan=plan,
            events=SimpleNamespace(write=lambda event: None),  # type: ignore[arg-type]
            files=[MemoryFile(f"/proc/{os.getpid()}/fd/{handle}") for handle in own],
            attempt=attempt,
            places=places,
            local_rank=local_rank,
            buddy=Buddy(buddy, dist.get_rank(), secret=SECRET) if buddy else None,
        )


def opened(launchers: Sequence[Launcher], rank: int, attempt: str = "a") -> MemoryCopies:
    """Return the copies of `rank` in an attempt on these hosts, each keeping the next one's."""
    procs = launchers[0].procs
    node = rank // procs
    buddy = launchers[node - 1].address if len(launchers) > 1 else ""
    return launchers[node].copies(rank % procs, buddy=buddy, attempt=attempt)


def whole_state(step: int) -> dict[str, Tensor]:
    """The state after a step: matrices of which ranks hold rows, and what each holds alike."""
    chance = torch.Generator().manual_seed(step)
    return {
        "model.matrix": torch.randn(13, 5, generator=chance),
        "optim.matrix.exp_avg": torch.randn(13, 5, generator=chance),
        "optim.matrix.step": torch.tensor(float(step)),
        "model.few": torch.randn(1, 3, generator=chance),
        "json.groups": torch.arange(step % 7, dtype=torch.uint8),
    }


def piece_of(name: str, tensor: Tensor) -> Piece:
    """A whole tensor, as the only rank has it."""
    ranks = PartMap(ranks=axes.Ranks({axes.DP_SHARD: 1}), rank=0)
    return Piece(part=ranks.part_of(name, tensor.shape, name, is_sharded=False), local=tensor)


def pieces_of(rank: int, world: int, step: int) -> list[Piece]:
    """What a rank holds of the state: also a buffer that is another on each, and its generator."""
    pieces: list[Piece] = []
    ranks = PartMap(ranks=axes.Ranks({axes.DP_SHARD: world}), rank=rank)
    for name, whole in whole_state(step).items():
        part = ranks.part_of(name, whole.shape, name, is_sharded=whole.ndim >= 2)
        rows = -(-len(whole) // world) if whole.ndim >= 2 else 0
        first = min(rank * rows, len(whole)) if rows else 0
        local = whole[first : first + rows] if rows else whole
        pieces.append(Piece(part=part, local=local, lasts=True))
    own = torch.tensor([rank, step])
    buffer, generator = (
        ranks.part_of(name, (2,), name, is_sharded=False) for name in ("model.seen", f"rng.{rank}")
    )
    pieces.append(Piece(part=buffer, local=own))
    return [*pieces, Piece(part=replace(generator, writes=True), local=own)]


def take(copies: MemoryCopies, step: int, started: float = 0.0) -> None:
    world = dist.get_world_size()
    pieces = pieces_of(dist.get_rank(), world, step)
    manifest = replace(MANIFEST, step=step, world_size=world)
    copies.take(State(pieces=pieces, manifest=manifest), started)
