"""Sums of gradients through shared memory: in the order of the ranks, whoever comes first."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.comms.groups import Groups
from colotrain.engine.parts.part_map import local_part, rows_of
from colotrain.engine.sharding import reduce_scatter as reductions
from colotrain.engine.sharding.reduce_scatter import Reduction
from colotrain.engine.sharding.sharded_model import ShardedModel, materialise_, shard_
from colotrain.engine.sharding.shared_parameters import share_parameters
from colotrain.errors import ColotrainError
from colotrain.lost_peers import PEER_LOST_MESSAGES, PeerLost
from colotrain.spec.plan import RunPlan
from tests.dist.test_transport import WITHIN_S, everyones, plan_of, run, world
from tests.representatives import representatives

SHAPES = [[(1,)], [(7, 3), (2,), (1, 5)], [(403, 11), (96, 64), (5,), (64, 2, 3)]]
"""Group → shapes of its parameters; most can not be cut evenly."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Given = Sequence[Sequence[Tensor | None]]
"""Group → gradient of each parameter; None where it is not used."""


class Weighing(nn.Module):
    """Its parameters get the gradients that it is given."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in shapes)

    def forward(self, x: Tensor, given: Sequence[Tensor | None]) -> Tensor:
        for weight, gradient in zip(self.weights, given, strict=True):
            if gradient is not None:
                x = x + (weight * gradient.to(weight.dtype)).sum()
        return x


class Blocks(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weighing(shapes, dtype) for shapes in SHAPES)

    def forward(self, x: Tensor, given: Given, order: Sequence[int] = range(len(SHAPES))) -> Tensor:
        for index in order:
            x = self.blocks[index](x, given[index])
        return x


def make(plan: RunPlan, dtype: torch.dtype) -> tuple[ShardedModel, Reduction]:
    model = Blocks(dtype)
    groups = [(f"blocks.{i}", [block]) for i, block in enumerate(model.blocks)]
    sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), groups)  # type: ignore[arg-type]
    reduction = Reduction(sharded)
    reduction.install()
    return sharded, reduction


def backward(sharded: ShardedModel, given: Given, *order: Sequence[int]) -> None:
    sharded.module(torch.zeros((), requires_grad=True), given, *order).backward()


def some(dtype: torch.dtype) -> list[list[Tensor | None]]:
    """Gradients of this rank, a fifth of which are not there."""
    return [
        [
            None
            if random.random() < 0.2
            else (torch.randn(shape) * 10 ** random.uniform(-2, 2)).to(dtype)
            for shape in shapes
        ]
        for shapes in SHAPES
    ]


def equal_sums(rank: int, plan: RunPlan, *dtypes: torch.dtype) -> None:
    torch.manual_seed(time.time_ns() + rank)
    random.seed(time.time_ns() + rank)
    for dtype, written in itertools.product(dtypes, (256, 32 << 20)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reductions, "MOST_WRITTEN_BYTES", written)  # 256: in many pieces
            patch.setattr(reductions, "PAGE", 64)
            sharded, reduction = make(plan, dtype)
            for _ in range(3):
                check_step(
                    sharded, dtype, dtype if plan.train.precision == "fp32" else torch.bfloat16
                )
            reduction.close()


def check_step(sharded: ShardedModel, dtype: torch.dtype, computed_in: torch.dtype) -> None:
    """Two micro-batches, and the same sums from what all ranks say that they have."""
    parameters = [[*block.weights] for block in sharded.module.blocks]
    expected: dict[nn.Parameter, Tensor] = {}
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    for order in ((0, 1, 2), (0, 1, 1, 2)):  # a group may be run twice
        given = some(computed_in)
        time.sleep(random.random() * random.choice((0.0, 0.02)))
        backward(sharded, given, order)
        for index in set(order):  # autograd adds up what a parameter's uses bring
            for parameter, gradient in zip(parameters[index], given[index], strict=True):
                mine = torch.zeros(parameter.shape) if gradient is None else gradient
                mine = mine * order.count(index)
                total = sum(each.to(wide) for each in everyones(mine.to(wide), world()))
                before = expected.get(parameter, torch.zeros(()))
                expected[parameter] = (before.to(wide) + total).to(dtype)
    for parameter, total in expected.items():
        group = parameter.data.device_mesh.get_group("dp_shard")  # type: ignore[attr-defined]
        start, rows = rows_of(parameter.shape[0], group.rank(), group.size())
        assert torch.equal(local_part(parameter.grad), total[start : start + rows])
        parameter.grad = None


@pytest.mark.parametrize("num_ranks", representatives([2, 3], kept=[3]))
def test_sums_are_in_the_order_of_the_ranks(num_ranks: int) -> None:
    run(equal_sums, num_ranks, plan_of("zero2", num_ranks), *DTYPES)


def test_gradients_of_mixed_precision_are_summed_in_fp32() -> None:
    plan = plan_of("zero2", 3, "train.precision=bf16")
    run(equal_sums, 3, plan, torch.float32, torch.bfloat16)


def test_sums_that_replicas_add_to_are_right_also_when_a_group_is_run_twice() -> None:
    plan = plan_of("fsdp-hybrid", 2, "plugin.shard_size=2")
    assert plan.plugin.mesh == (1, 2)
    run(equal_sums, 2, plan, torch.float32, torch.float64)


def different_groups(rank: int, plan: RunPlan) -> None:
    sharded, _ = make(plan, torch.float32)
    shared_params = share_parameters(sharded)
    assert shared_params is not None
    # gathers would differ before
    materialise_(sharded, device="cpu", seed=0, allocate=shared_params.allocate)
    with pytest.raises(ColotrainError, match="reduce different groups"):
        backward(sharded, some(torch.float32), (0, 1, 2) if rank else (2, 1, 0))


def test_ranks_that_run_modules_in_different_orders_are_told() -> None:
    run(different_groups, 2, plan_of("zero2", 2))


def loses_a_peer(rank: int, folder: Path, plan: RunPlan) -> None:
    sharded, _ = make(plan, torch.float32)
    for group in sharded.groups:  # gathered once, so that ranks wait in reductions alone
        group.handle.set_reshard_after_backward(False)
    backward(sharded, some(torch.float32))
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    started = time.time()
    try:
        while time.time() - started < 60:
            backward(sharded, some(torch.float32))
    except PeerLost as error:
        (folder / f"error{rank}").write_text(f"{time.time()} {error}")
    finally:
        os._exit(0)


def test_a_killed_rank_is_an_error_on_the_others_within_seconds(tmp_path: Path) -> None:
    context = run(loses_a_peer, 3, tmp_path, plan_of("zero2", 3), join=False)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("pid*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5 + random.random() * 0.1)
    killed = time.time()
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    for process in context.processes:
        process.join(20)
    for rank in (0, 2):
        at, text = (tmp_path / f"error{rank}").read_text().split(" ", 1)
        assert float(at) - killed < WITHIN_S
        assert "rank 1 " in text
        assert any(mark in text for mark in PEER_LOST_MESSAGES)
