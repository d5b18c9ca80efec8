"""Shared parameters: training is as with gathers, and memory is there once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from colotrain.engine.comms import shared_memory
from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients.gradients import GradientState
from colotrain.engine.model import probes
from colotrain.engine.model.probes import highest_peak, memory_now
from colotrain.engine.sharding.fsdp_internals import put_shard
from colotrain.engine.sharding.sharded_model import Group, shard_
from colotrain.engine.sharding.shared_parameters import SharedParameters, share_parameters
from colotrain.engine.sharding.transport import install
from colotrain.spec.plan import RunPlan
from tests.dist.test_transport import assert_alike, make_sharded, plan_of, run, train


def share(plan: RunPlan, frozen: Sequence[str] = ()) -> SharedParameters:
    """The shared parameters of a sharded model."""
    sharded = make_sharded(plan, frozen)
    install(sharded)
    shared_params = share_parameters(sharded)
    assert shared_params is not None
    return shared_params


def trains_alike(rank: int, *plans: RunPlan, frozen: Sequence[str] = ()) -> None:
    for plan in plans:
        plain = train(make_sharded(plan, frozen), rank)
        shared_params = share(plan, frozen)
        shared = train(shared_params.sharded, rank, allocate=shared_params.allocate)
        sharded = shared_params.sharded
        assert [*sharded.in_common] == [group.name for group in sharded.groups]
        assert_alike(shared, plain)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_steps_equal_those_with_gathers(num_ranks: int) -> None:
    plans = [plan_of(plugin, num_ranks) for plugin in ("zero1", "zero2", "zero3")]
    run(trains_alike, num_ranks, *plans)


def trains_frozen_alike(rank: int, plan: RunPlan) -> None:
    trains_alike(rank, plan, frozen=("embed", "blocks.0", "blocks.1"))


def test_so_they_do_with_frozen_groups() -> None:
    run(trains_frozen_alike, 2, plan_of("zero3", 2))


def test_a_hybrid_mesh_has_one_copy_in_each_shard_group() -> None:
    run(trains_alike, 4, plan_of("fsdp-hybrid", 4, "plugin.shard_size=2"))


def waits_for_updates(rank: int, plan: RunPlan) -> None:
    plain = train(make_sharded(plan), rank)
    shared_params = share(plan)

    def before_update(step: int) -> None:
        if rank == step % 2:
            time.sleep(0.3)

    slow = train(
        shared_params.sharded, rank, allocate=shared_params.allocate, before_update=before_update
    )
    assert all(torch.equal(*pair) for pair in zip(slow, plain, strict=True))


@pytest.mark.parametrize("plugin", ["zero1", "zero3"])
def test_a_forward_waits_for_the_update_of_the_others(plugin: str) -> None:
    run(waits_for_updates, 2, plan_of(plugin, 2))


def move_elsewhere(groups: Sequence[Group], shared_params: SharedParameters) -> None:
    """As gemini moves parameters to disk: other memory, and the shared memory is freed."""
    for param in (param for group in groups for param in group.params):
        put_shard(param, torch.empty_like(param._sharded_param_data), fresh=False)
    shared_params.unshare(groups)


def unshares(rank: int, plan: RunPlan) -> None:
    plain = train(make_sharded(plan), rank)
    shared_params = share(plan)
    used: list[set[str]] = []

    def before_update(step: int) -> None:
        used.append(set(state.used_here))
        if step == 1:
            move_elsewhere(shared_params.sharded.groups[1:3], shared_params)
            groups = shared_params.sharded.groups
            assert [*shared_params.sharded.in_common] == [groups[0].name, groups[3].name]

    def knows(found: GradientState) -> None:
        nonlocal state
        state = found

    state: GradientState
    mixed = train(
        shared_params.sharded,
        rank,
        allocate=shared_params.allocate,
        before_update=before_update,
        knows=knows,
    )
    assert all(torch.equal(*pair) for pair in zip(mixed, plain, strict=True))
    assert used == [set(dict(shared_params.sharded.module.named_parameters()))] * 3


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_groups_that_move_elsewhere_are_gathered_again(num_ranks: int) -> None:
    run(unshares, num_ranks, plan_of("zero3", num_ranks))


def counts_memory(rank: int, plan: RunPlan) -> None:
    model = nn.Linear(2048, 4096, bias=False)  # 32 MiB
    shared_params = share_parameters(shard_(model, plan, Groups(plan.ranks, "cpu"), []))
    assert shared_params is not None
    shared_params.allocate(False)
    shared_params.populate()
    resident, counted = psutil.Process().memory_info().rss, memory_now()[0]
    assert resident - counted == pytest.approx(16 << 20, abs=1 << 20)
    probes.reset_peak()
    probes._earlier.highest = 0  # not what building took
    move_elsewhere(shared_params.sharded.groups, shared_params)
    dist.barrier()
    after = psutil.Process().memory_info().rss
    assert after - resident == pytest.approx((16 - 32) << 20, abs=2 << 20)
    assert after == pytest.approx(memory_now()[0], abs=1 << 20)
    assert highest_peak() < counted + (20 << 20)  # with the copy, and without the others' part


def test_each_rank_counts_its_own_part_and_what_is_unshared_is_free() -> None:
    run(counts_memory, 2, plan_of("zero3", 2))


def in_half_precision(rank: int, plan: RunPlan) -> None:
    assert share_parameters(make_sharded(plan)) is None


def test_parameters_that_are_cast_are_gathered() -> None:
    run(in_half_precision, 2, plan_of("zero3", 2, "train.precision=bf16"))


def finds_no_room(rank: int, plan: RunPlan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory.host, "free_bytes", lambda: 1000)
        assert share_parameters(make_sharded(plan)) is None


def test_without_room_for_one_copy_parameters_are_gathered() -> None:
    run(finds_no_room, 2, plan_of("zero3", 2))
