"""Shared memory between ranks: the same values as the process group, and an end to every wait."""

from __future__ import annotations

import datetime
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from colotrain.cli.resolving import plan_from
from colotrain.engine import channel as channels
from colotrain.engine import shared_memory, transport
from colotrain.engine.accumulation import StepTotals, accumulate
from colotrain.engine.channel import Channel
from colotrain.engine.gradients import watch
from colotrain.engine.sharding import ShardedModel, local_shard, make_mesh, materialise_, shard_
from colotrain.engine.shared_memory import PeerLost
from colotrain.engine.transport import SharedAllGather, SharedReduceScatter, install
from colotrain.launch.causes import OF_A_PEER

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)
NUMELS = (0, 1, 7, 4099, 700_001)
"""Per rank. The last is too large for the buffers of these tests and for one piece of a window."""
BUFFER_BYTES = 1 << 20
CPU = torch.device("cpu")
WITHIN_S = 5.0


def run(work: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """`work(rank, *args)` on `num_ranks` connected ranks; raises what a rank raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_connected, (work, num_ranks, port, args), nprocs=num_ranks)


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
    return Channel(group or world(), gather_bytes=BUFFER_BYTES, reduce_bytes=BUFFER_BYTES)


def values(numel: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return (torch.randn(numel) * 10 ** random.uniform(-2, 2)).to(dtype)
    return torch.randint(0, 100, (numel,)).to(dtype)


def gathered(channel: Channel, part: Tensor, *, lent: bool, async_op: bool = False) -> Tensor:
    """The all-gather of `part`, in place in a shared buffer or from one private tensor to another."""
    comm, numel = SharedAllGather(channel), part.numel() * channel.size
    output = torch.empty(numel, dtype=part.dtype)
    if lent:
        output = comm.allocate((numel,), dtype=part.dtype, device=CPU)
        part = output.view(channel.size, -1)[channel.rank].copy_(part)
    work = comm(output, part, channel.group, async_op)
    assert (work is None) == (not async_op)
    if work is not None:
        work.wait()
    return output


def reduced(channel: Channel, whole: Tensor, *, lent: bool) -> Tensor:
    """This rank's part of the sum; the private way in place: the output is a part of the input."""
    comm = SharedReduceScatter(channel)
    numel = whole.numel() // channel.size
    if not lent:
        whole = whole.clone()
        output = whole.view(channel.size, -1)[channel.rank]
    else:
        whole = comm.allocate((whole.numel(),), dtype=whole.dtype, device=CPU).copy_(whole)
        output = comm.allocate((numel,), dtype=whole.dtype, device=CPU)
    comm(output, whole, channel.group, dist.ReduceOp.SUM)
    return output.clone()


def expected_sum(everyones: list[Tensor], rank: int) -> Tensor:
    """Rank `rank`'s part of the sum in the order of the ranks, in fp32 where that is wider."""
    dtype = everyones[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    parts = [whole.view(len(everyones), -1)[rank].to(wide) for whole in everyones]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def everyones(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    if tensor.numel():
        dist.all_gather(found, tensor, group=group)
    return found


def check_values(channel: Channel, *, delays: bool) -> None:
    for dtype in DTYPES:
        for numel in NUMELS:
            for lent in (True, False):
                if delays:
                    time.sleep(random.random() * 0.003)
                part, whole = values(numel, dtype), values(numel * channel.size, dtype)
                told = torch.cat(everyones(part, channel.group))
                found = gathered(channel, part, lent=lent, async_op=random.choice((True, False)))
                assert torch.equal(found, told), (dtype, numel, lent)
                total = expected_sum(everyones(whole, channel.group), channel.rank)
                assert torch.equal(reduced(channel, whole, lent=lent), total), (dtype, numel, lent)


def equals_process_group(rank: int) -> None:
    torch.manual_seed(time.time_ns() + rank)
    random.seed(0)  # the same choices on every rank
    channel = make_channel()
    check_values(channel, delays=False)
    check_values(channel, delays=True)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_equal_the_process_group_and_sums_in_rank_order(num_ranks: int) -> None:
    run(equals_process_group, num_ranks)


def repeats_itself(rank: int) -> None:
    torch.manual_seed(rank)
    random.seed(time.time_ns() + rank)
    channel = make_channel()
    part, whole = torch.randn(10_001), torch.randn(10_001 * channel.size).bfloat16()
    held: list[Tensor] = []
    first = None
    for _ in range(60):
        time.sleep(random.random() * random.choice((0.0, 0.002, 0.02)))
        lent = random.random() < 0.7  # ranks differ in where their tensors lie
        held = [*held[-random.choice((0, 1, 2)) :], gathered(channel, part, lent=lent)]
        found = (held[-1].clone(), reduced(channel, whole, lent=random.random() < 0.7))
        first = first or found
        assert torch.equal(found[0], first[0])
        assert torch.equal(found[1], first[1])
        assert all(torch.equal(old, first[0]) for old in held)  # nobody wrote into what is held
        part, held_part = part + 0.0, part
        assert torch.equal(part, held_part)


def test_results_are_the_same_bits_for_any_order_of_arrival_and_any_buffers() -> None:
    run(repeats_itself, 3)


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
            assert torch.equal(gathered(channel, part, lent=True), told)


def test_channels_of_a_mesh_do_not_disturb_each_other() -> None:
    run(two_meshes, 4)


def other_operations(rank: int) -> None:
    channel = make_channel()
    comm, whole, output = SharedReduceScatter(channel), torch.arange(4.0) + rank, torch.empty(2)
    comm(output, whole, channel.group, dist.ReduceOp.MAX)
    assert output.tolist() == [2.0 * rank + 1, 2.0 * rank + 2]
    with pytest.raises(ValueError, match="same collectives"):
        channel.all_gather(torch.empty(2 * (rank + 1)), torch.empty(rank + 1))


def test_another_operation_is_left_to_the_process_group_and_different_calls_are_an_error() -> None:
    run(other_operations, 2)


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


def make_tiny() -> Tiny:
    return Tiny()


def make_sharded(plugin: str, *overrides: str) -> ShardedModel:
    ranks = dist.get_world_size()
    more = [f"plugin={plugin}", f"cluster.procs_per_node={ranks}", *overrides]
    plan = plan_from(["recipe=llm-tiny", "train.global_batch=8", "train.micro_batch=2", *more])
    torch.manual_seed(0)
    model = Tiny()
    groups = [(f"blocks.{i}", [block]) for i, block in enumerate(model.blocks)]
    return shard_(model, plan, make_mesh(plan.plugin, "cpu"), groups)  # type: ignore[arg-type]


def train(sharded: ShardedModel, rank: int) -> list[Tensor]:
    """Three SGD steps of two micro-batches each; this rank's shards and last gradients."""
    materialise_(sharded, device="cpu", seed=0)
    state = watch(sharded, frozen={})
    generator = torch.Generator().manual_seed(rank)
    parameters = list(sharded.module.parameters())
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = None
        batches = [
            {
                "x": torch.randint(0, 11, (4,), generator=generator),
                "labels": torch.randint(0, 5, (4,), generator=generator),
            }
            for _ in range(2)
        ]
        accumulate(state, batches, num=2, totals=StepTotals(nominal=8.0))
        for parameter in parameters:
            local_shard(parameter.data).sub_(local_shard(parameter.grad), alpha=0.1)
    return [local_shard(t).clone() for p in parameters for t in (p.detach(), p.grad)]


def trains_alike(rank: int, cases: list[tuple[str, ...]]) -> None:
    for case in cases:
        plain = train(make_sharded(*case), rank)
        sharded = make_sharded(*case)
        installed = install(sharded)
        assert installed is not None
        assert installed.num_bytes > 0
        shared = train(sharded, rank)
        for ours, theirs in zip(shared, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
            if dist.get_world_size() == 2:  # two summands: gloo's order cannot differ
                assert torch.equal(ours, theirs)
        installed.close()
        train(sharded, rank)  # through the process group again


def test_training_steps_equal_those_of_the_process_group() -> None:
    plugins = [("zero1",), ("zero2",), ("zero3",), ("zero3", "train.precision=bf16")]
    run(trains_alike, 2, plugins)


def test_a_hybrid_mesh_shares_memory_inside_its_shard_dimension() -> None:
    run(trains_alike, 4, [("fsdp-hybrid", "plugin.shard_size=2")])


def falls_back(rank: int, lacking: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if lacking == "memory":
            patch.setattr(shared_memory, "available_bytes", lambda: 1000)
        elif rank == 1:
            patch.setattr(os, "pidfd_open", _refuse)
        sharded = make_sharded("zero3")
        assert install(sharded) is None
    train(sharded, rank)


def _refuse(_: int) -> int:
    raise PermissionError("not here")


@pytest.mark.parametrize(
    ("lacking", "reason"), [("memory", "MiB of memory are free"), ("rights", "rank 1: not here")]
)
def test_all_ranks_fall_back_together_and_one_says_why(
    lacking: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run(falls_back, 3, lacking)
    said = [line for line in capfd.readouterr().err.splitlines() if "shared memory" in line]
    assert len(said) == 1
    assert reason in said[0]


def loses_a_peer(rank: int, folder: Path, hang: bool) -> None:
    channel = make_channel()
    if hang:
        channel.memory.timeout_s = 1.0
    part, whole = torch.randn(50_000), torch.randn(150_000)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    started = time.time()
    try:
        while time.time() - started < 60:
            if hang and rank == 1 and time.time() - started > 0.5:
                time.sleep(60)
            gathered(channel, part, lent=random.random() < 0.8)
            reduced(channel, whole, lent=random.random() < 0.8)
    except PeerLost as error:
        (folder / f"error{rank}").write_text(f"{time.time()} {error}")
    finally:
        os._exit(0)


def start(folder: Path, *, hang: bool) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (loses_a_peer, 3, port, (folder, hang))
    context = mp.spawn(_connected, arguments, nprocs=3, join=False)
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
    before = sorted(os.listdir("/dev/shm"))
    context = start(tmp_path, hang=False)
    time.sleep(0.5 + random.random() * 0.1)
    killed = time.time()
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    found = errors(tmp_path)
    assert sorted(found) == [0, 2]
    for at, text in found.values():
        assert at - killed < WITHIN_S
        assert "rank 1 " in text
        assert any(mark in text for mark in OF_A_PEER)
    for process in context.processes:
        process.join(10)
    assert sorted(os.listdir("/dev/shm")) == before


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
