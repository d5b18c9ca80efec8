"""Counts and bytes of collectives, against a table counted on real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colotrain.planner.communication import OwnedMatrices, Traffic, owned_matrices
from colotrain.planner.communication import traffic as traffic_of
from colotrain.planner.layout import layout_of
from colotrain.spec.axes import EP
from colotrain.spec.divisions import SUM_BYTES, Divisions
from colotrain.spec.plan import BatchPlan, OptimPlan, PluginPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.survey import ParameterInfo, Segment, Survey, Trace

BLOCKS = 4


def survey(frozen: str | None = None) -> Survey:
    """Four blocks of 8 × 8 and a root of 4 × 8, fp32."""

    def parameter(name: str, rows: int, group: str) -> ParameterInfo:
        frozen_by = frozen if frozen and name.startswith(frozen) else None
        return ParameterInfo(
            name=name, shape=(rows, 8), numel=rows * 8, itemsize=4, frozen_by=frozen_by, group=group
        )

    blocks = [parameter(f"b.{i}.weight", 8, f"b.{i}") for i in range(BLOCKS)]
    return Survey(parameters=(*blocks, parameter("head", 4, "")), matched={}, flops_per_token=1.0)


def plugin(name: str, mesh: tuple[int, ...]) -> PluginPlan:
    row = ROWS[name]
    return PluginPlan(
        name=name,
        reason="",
        parameters_live=row.parameters_live,
        gradients=row.gradients,
        mesh=mesh,
    )


def batch(steps: int) -> BatchPlan:
    return BatchPlan(global_batch=steps, micro_batch=1, accumulation_steps=steps, data_parallel=1)


OPTIM = OptimPlan(
    name="sgd",
    lr=1.0,
    betas=(0.0,),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warmup_steps=0,
    final_ratio=1.0,
)


def traffic(plugin: PluginPlan, survey: Survey, batch: BatchPlan, precision: str) -> Traffic:
    return traffic_of(layout_of(plugin, batch, optim=OPTIM, precision=precision), survey)


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"),
    [("zero1", 5, 5), ("zero2", 5, 20), ("zero3", 36, 20), ("gemini", 36, 20)],
)
def test_collectives_of_a_step_of_four_micro_batches(
    name: str, gathers: int, reductions: int
) -> None:
    found = traffic(plugin(name, (2,)), survey(), batch(4), "fp32")
    assert (found.gathers, found.reductions) == (gathers, reductions)


def test_bytes_are_what_one_rank_of_a_ring_sends() -> None:
    whole = (4 * 64 + 32) * 4
    found = traffic(plugin("zero2", (4,)), survey(), batch(2), "fp32")
    assert found.bytes_per_step == whole * 3 // 4 + 2 * whole * 3 // 4


def test_half_precision_gathers_half_and_reduces_in_fp32() -> None:
    whole = (4 * 64 + 32) * 4
    found = traffic(plugin("zero2", (2,)), survey(), batch(1), "bf16")
    assert found.bytes_per_step == whole // 2 // 2 + whole // 2


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    one, all_ = 64 * 4, (4 * 64 + 32) * 4
    found = traffic(plugin("zero1", (2,)), survey("b.0"), batch(1), "fp32")
    assert found.reductions == 4
    assert found.bytes_per_step == all_ // 2 + (all_ - one) // 2


def test_replicas_all_reduce_their_shards_once_a_step() -> None:
    whole = (4 * 64 + 32) * 4
    alone = traffic(plugin("zero1", (2,)), survey(), batch(1), "fp32").bytes_per_step
    hybrid = plugin("zero1", (2, 2))
    found = traffic(hybrid, survey(), batch(1), "fp32").bytes_per_step
    assert found - alone == 2 * whole // 2 // 2


def test_one_rank_sends_nothing() -> None:
    found = traffic(plugin("zero3", (1,)), survey(), batch(4), "fp32")
    assert (found.gathers, found.reductions, found.bytes_per_step) == (0, 0, 0)


@pytest.mark.parametrize(("name", "added"), [("zero2", BLOCKS + 1), ("zero3", 3 * (BLOCKS + 1))])
def test_a_pass_before_the_step_gathers_as_its_forwards_do(name: str, added: int) -> None:
    layout = layout_of(plugin(name, (2,)), batch(3), optim=OPTIM, precision="fp32")
    segments = tuple(Segment(phase="forward", block=f"b.{i}", events=()) for i in range(BLOCKS))
    without = Trace(segments=segments, storages=(), gradients={})
    before, found = (
        traffic_of(layout, survey(), trace).gathers
        for trace in (without, replace(without, passes_before=1))
    )
    assert found - before == added


def test_ranks_that_divide_experts_sum_the_gradients_of_all_others_once_a_step() -> None:
    alone = layout_of(plugin("zero3", (2,)), batch(3), optim=OPTIM)
    first, second, *others, head = survey("b.1").parameters
    divided = replace(first, divided_shape=(32, 8))
    parameters, experts = (divided, second, *others, head), Divisions(axis=EP, dims={first.name: 0})
    model = replace(survey(), parameters=parameters, experts=experts)
    found, other = (traffic_of(layout, model) for layout in (replace(alone, expert_ranks=4), alone))
    dense = (2 * 64 + 32) * 4 // 2  # a rank's shard; one block has experts, one is frozen
    assert found.bytes_per_step - other.bytes_per_step == 2 * 3 * dense // 4
    assert (found.summed_calls, other.summed_calls) == (2 + 2, 0)
    assert found.summed_whole == 2 * dense
    rows = (SUM_BYTES // 4 // 8 + 1) * 2
    large = replace(head, shape=(rows, 8), numel=rows * 8)
    more = replace(model, parameters=(divided, large, replace(large, dtype="bf16", itemsize=2)))
    found = traffic_of(replace(alone, expert_ranks=4), more)
    assert found.summed_calls == 2 + 2 * (2 + 1)  # one number's row more than a buffer has


def test_matrices_of_muon_go_to_one_rank_each_and_back() -> None:
    layout = layout_of(plugin("zero3", (4,)), batch(1), optim=replace(OPTIM, name="muon"))
    found, other = (traffic_of(replace(layout, optim=o), survey()) for o in (layout.optim, OPTIM))
    sent = 0
    for _ in range(BLOCKS):  # three ranks send 2 of 8 rows to the fourth, which sends them theirs
        sent += 3 * 2 * 8 * 2 + 3 * 2 * 8 * 2
    assert found.bytes_per_step - other.bytes_per_step == sent / 4
    assert found.owned_calls == 2  # four matrices, one for each rank
    needed = owned_matrices(layout, survey())
    assert needed.flops == 5 * (2 * 8 * 8 * 8) * 3  # one matrix: five times three products
    assert needed.needed_bytes == 2 * (3 * 8 * 8 + 2 * 8 * 8)
    assert owned_matrices(replace(layout, optim=OPTIM), survey()) == OwnedMatrices()
