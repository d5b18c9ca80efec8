"""Shared memory between ranks: the same values as the process group, and an end to every wait."""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from colotrain.engine.comms import all_gather as channels
from colotrain.engine.comms import shared_memory
from colotrain.engine.comms.all_gather import Channel
from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.gradients.gradients import GradientState, watch
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.sharding import transport
from colotrain.engine.sharding.sharded_model import ShardedModel, materialise_, shard_
from colotrain.engine.sharding.transport import SharedAllGather, install
from colotrain.lost_peers import PEER_LOST_MESSAGES, PeerLost
from colotrain.spec.plan import RunPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)
NUMELS = (0, 1, 7, 4099, 300_001)
"""Per rank. The last is too large for the buffer of these tests and for one piece of a window."""
BUFFER_BYTES = 1 << 20
CPU = torch.device("cpu")
PRELOADED = ["torch.distributed.fsdp", "colotrain.engine.sharding.transport"]
WITHIN_S = 5.0


def run(work: Callable[..., None], num_ranks: int, *args: Any, join: bool = True) -> Any:
    """`work(rank, *args)` on `num_ranks` connected ranks; raises what a rank raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = (work, num_ranks, port, args)
    return mp.start_processes(_connected, arguments, num_ranks, join, start_method="forkserver")


def _connected(rank: int, work: Callable[..., None], num_ranks: int, port: int, args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timeout)
    work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def make_channel(group: dist.ProcessGroup | None = None) -> Channel:
    return Channel(group or world(), buffer_bytes=BUFFER_BYTES)


def values(numel: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return (torch.randn(numel) * 10 ** random.uniform(-2, 2)).to(dtype)
    return torch.randint(0, 100, (numel,)).to(dtype)


def gathered(channel: Channel, part: Tensor, *, in_buffer: bool, async_op: bool = False) -> Tensor:
    """The all-gather of `part`, in place in a shared buffer or between private tensors."""
    comm, numel = SharedAllGather(channel), part.numel() * channel.size
    output = torch.empty(numel, dtype=part.dtype)
    if in_buffer:
        output = comm.allocate((numel,), dtype=part.dtype, device=CPU)
        part = output.view(channel.size, -1)[channel.rank].copy_(part)
    work = comm(output, part, channel.group, async_op)
    assert (work is None) == (not async_op)
    if work is not None:
        work.wait()
    return output


def everyones(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    if tensor.numel():
        dist.all_gather(found, tensor, group=group)
    return found


def equals_process_group(rank: int) -> None:
    torch.manual_seed(time.time_ns() + rank)
    random.seed(0)  # the same choices on every rank
    channel = make_channel()
    for dtype in DTYPES:
        for numel in NUMELS:
            for in_buffer in (True, False):
                part = values(numel, dtype)
                told = torch.cat(everyones(part, channel.group))
                found = gathered(
                    channel, part, in_buffer=in_buffer, async_op=random.choice((True, False))
                )
                assert torch.equal(found, told), (dtype, numel, in_buffer)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_gathers_equal_those_of_the_process_group(num_ranks: int) -> None:
    run(equals_process_group, num_ranks)


def repeats_itself(rank: int) -> None:
    random.seed(time.time_ns() + rank)
    channel = make_channel()
    first = results(channel, seed=rank)
    for _ in range(2):
        for found, before in zip(results(channel, seed=rank), first, strict=True):
            assert torch.equal(found, before)


def results(channel: Channel, *, seed: int) -> list[Tensor]:
    """What 50 all-gathers give, with delays and buffers that differ.

    Results are held for a while, as `fully_shard` does, and must not change meanwhile.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    held: list[tuple[Tensor, Tensor]] = []
    for _ in range(50):
        time.sleep(random.random() * random.choice((0.0, 0.0, 0.002, 0.02)))
        part = torch.randn(10_001, generator=generator)
        told = gathered(channel, part, in_buffer=random.random() < 0.8)
        held = [*held[len(held) - random.choice((0, 1, 1, 2)) :], (told, told.clone())][-3:]
        found.append(told.clone())
        assert all(torch.equal(now, then) for now, then in held)
    return found


def test_gathers_are_the_same_bits_for_any_order_of_arrival_and_any_buffers() -> None:
    run(repeats_itself, 3)


def lets_go_late(rank: int) -> None:
    channel = make_channel()
    held = [gathered(channel, torch.randn(1000), in_buffer=True)]
    if rank == 0:
        held.clear()
    for _ in range(2):
        gathered(channel, torch.randn(1000), in_buffer=True)
    held.clear()
    dist.barrier()
    for _ in range(2):
        assert channel.buffer.holds(gathered(channel, torch.randn(1000), in_buffer=True))


def test_a_buffer_that_one_rank_held_for_long_is_shared_again_afterwards() -> None:
    run(lets_go_late, 2)


def two_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)
    random.seed(0)
    pair, across, all_ranks = mesh.get_group("shard"), mesh.get_group("replicate"), world()
    opened = [make_channel(group) for group in (pair, across, all_ranks)]
    for _ in range(5):
        for channel in opened:
            part = torch.randn(1000)
            told = torch.cat(everyones(part, channel.group))
            assert torch.equal(gathered(channel, part, in_buffer=True), told)


def test_channels_of_a_mesh_do_not_disturb_each_other() -> None:
    run(two_meshes, 4)


def different_sizes(rank: int) -> None:
    channel = make_channel()
    with pytest.raises(ValueError, match="same collectives"):
        channel.all_gather(torch.empty(2 * (rank + 1)), torch.empty(rank + 1))


def test_different_sizes_are_an_error() -> None:
    run(different_sizes, 2)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return nn.functional.cross_entropy(self.head(hidden), labels)


def plan_of(plugin: str, num_ranks: int, *overrides: str) -> RunPlan:
    from colotrain.runs.resolving import plan_from  # ranks need none of what this imports

    more = [f"plugin={plugin}", f"cluster.procs_per_node={num_ranks}", *overrides]
    return plan_from(["recipe=llm-tiny", "train.global_batch=12", "train.micro_batch=1", *more])


def make_sharded(plan: RunPlan, frozen: Sequence[str] = ()) -> ShardedModel:
    torch.manual_seed(0)
    model = Tiny()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    groups = [(f"blocks.{i}", [block]) for i, block in enumerate(model.blocks)]
    return shard_(model, plan, Groups(plan.ranks, "cpu"), groups)  # type: ignore[arg-type]


def train(
    sharded: ShardedModel,
    rank: int,
    *,
    allocate: Callable[[bool], None] = lambda fresh: None,
    before_update: Callable[[int], None] = lambda step: None,
    knows: Callable[[GradientState], None] = lambda state: None,
) -> list[Tensor]:
    """Three SGD steps of two micro-batches each; this rank's shards and last gradients."""
    materialise_(sharded, device="cpu", seed=0, allocate=allocate)
    state = watch(sharded)
    knows(state)
    generator = torch.Generator().manual_seed(rank)
    parameters = [p for p in sharded.module.parameters() if p.requires_grad]
    for step in range(3):
        for parameter in parameters:
            parameter.grad = None
        batches = [
            {
                "x": torch.randint(0, 11, (4,), generator=generator),
                "labels": torch.randint(0, 5, (4,), generator=generator),
            }
            for _ in range(2)
        ]
        state.used_here.clear()
        accumulate(state, batches, num=2, totals=StepTotals(nominal=8.0))
        before_update(step)
        for parameter in parameters:
            local_part(parameter.data).sub_(local_part(parameter.grad), alpha=0.1)
    return [local_part(t).clone() for p in parameters for t in (p.detach(), p.grad)]


def assert_alike(shared: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    for ours, theirs in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        if dist.get_world_size() <= 2:  # two summands: gloo's order cannot differ
            assert torch.equal(ours, theirs)


def trains_alike(rank: int, *plans: RunPlan, frozen: Sequence[str] = ()) -> None:
    for plan in plans:
        plain = train(make_sharded(plan, frozen), rank)
        sharded = make_sharded(plan, frozen)
        installed = install(sharded)
        assert installed is not None
        assert installed.num_bytes > 0
        shared = train(sharded, rank)
        assert installed.channel.num_rounds == 0  # every collective had the buffers it asked for
        assert_alike(shared, plain)
        installed.close()
        train(sharded, rank)  # through the process group again


def test_training_steps_equal_those_of_the_process_group() -> None:
    plans = [plan_of(plugin, 2) for plugin in ("zero1", "zero2", "zero3")]
    run(trains_alike, 2, *plans, plan_of("zero3", 2, "train.precision=bf16"))


def trains_the_end_alike(rank: int, plan: RunPlan) -> None:
    trains_alike(rank, plan, frozen=("embed", "blocks.0", "blocks.1"))


def test_a_frozen_group_that_backward_fetched_in_vain_does_not_keep_the_buffer() -> None:
    run(trains_the_end_alike, 2, plan_of("zero3", 2))


def test_a_hybrid_mesh_shares_memory_inside_its_shard_dimension() -> None:
    run(trains_alike, 4, plan_of("fsdp-hybrid", 4, "plugin.shard_size=2"))


def falls_back(rank: int, folder: Path, lacking: str, plan: RunPlan) -> None:
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        if lacking == "memory":
            patch.setattr(shared_memory.host, "free_bytes", lambda: 1000)
        elif rank == 1:
            patch.setattr(os, "pidfd_open", _refuse)
        sharded = make_sharded(plan)
        assert install(sharded) is None
    (folder / f"said{rank}").write_text(said.getvalue())
    train(sharded, rank)


def _refuse(_: int) -> int:
    raise PermissionError("not here")


@pytest.mark.parametrize(
    ("lacking", "reason"), [("memory", "MiB of memory are free"), ("rights", "rank 1: not here")]
)
def test_all_ranks_fall_back_together_and_one_says_why(
    lacking: str, reason: str, tmp_path: Path
) -> None:
    run(falls_back, 3, tmp_path, lacking, plan_of("zero3", 3))
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(3)]
    assert said[0].count("shared memory is not used") == 1
    assert reason in said[0]
    assert said[1:] == ["", ""]


def loses_a_peer(rank: int, folder: Path, hang: bool) -> None:
    channel = make_channel()
    if hang:
        channel.memory.timeout_s = 1.0
    part = torch.randn(50_000)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    started = time.time()
    try:
        while time.time() - started < 60:
            if hang and rank == 1 and time.time() - started > 0.5:
                time.sleep(60)
            gathered(channel, part, in_buffer=random.random() < 0.8)
    except PeerLost as error:
        (folder / f"error{rank}").write_text(f"{time.time()} {error}")
    finally:
        os._exit(0)


def files_in_shared_memory() -> set[str]:
    """What other programs come and go with, named semaphores, left out."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def start(folder: Path, *, hang: bool) -> Any:
    context = run(loses_a_peer, 3, folder, hang, join=False)
    until = time.monotonic() + 60
    while len(list(folder.glob("pid*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    return context


def errors(folder: Path) -> dict[int, tuple[float, str]]:
    until = time.monotonic() + 20
    while len(list(folder.glob("error*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.1)
    found = {int(p.name[5:]): p.read_text().split(" ", 1) for p in folder.glob("error*")}
    return {rank: (float(at), text) for rank, (at, text) in found.items()}


def test_a_killed_rank_is_an_error_on_the_others_within_seconds(tmp_path: Path) -> None:
    before = files_in_shared_memory()
    context = start(tmp_path, hang=False)
    time.sleep(0.5 + random.random() * 0.1)
    killed = time.time()
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    found = errors(tmp_path)
    assert sorted(found) == [0, 2]
    for at, text in found.values():
        assert at - killed < WITHIN_S
        assert "rank 1 " in text
        assert any(mark in text for mark in PEER_LOST_MESSAGES)
    for process in context.processes:
        process.join(10)
    assert files_in_shared_memory() == before


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    context = start(tmp_path, hang=True)
    found = errors(tmp_path)
    for process in context.processes:
        process.kill()
        process.join(10)
    assert sorted(found) == [0, 2]
    assert "Timed out waiting 1 s for rank 1" in found[0][1]


def test_windows_are_of_fixed_size() -> None:
    assert channels.WINDOW_BYTES <= 16 << 20
    assert transport.LARGEST_BUFFER_BYTES <= 64 << 20
