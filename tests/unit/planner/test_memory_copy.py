"""What `elastic.memory_copy` allows, and what the plan says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planner.test_resolve import LAPTOP, SERVER, TOTAL, one_line, plan

KEY = "elastic.memory_copy"
RANKS = (("cluster.procs_per_node", 2), ("plugin.name", "zero3"))


def test_copies_are_made_where_two_of_them_fit() -> None:
    copies = plan(*RANKS).elastic.memory_copy
    state = TOTAL * 12 // 2  # parameters and two moments of float32, of one of two ranks
    assert copies.enabled
    assert copies.share == 0.01
    assert 2 * state <= copies.bytes <= 2 * state + (3 << 20)
    whole = plan(*RANKS).peak.high + copies.bytes
    for host_bytes, fits in ((2 * whole - 4, False), (2 * whole + 4, True)):
        made = plan(*RANKS, machine=replace(LAPTOP, host_memory_bytes=host_bytes))
        assert made.elastic.memory_copy.enabled is fits
    on_gpus = plan(*RANKS, machine=SERVER).elastic.memory_copy
    assert (on_gpus.enabled, "off on GPUs" in on_gpus.reason) == (False, True)
    assert on_gpus.bytes == pytest.approx(1.5 * copies.bytes, rel=0.1)  # one on its way to the host
    asked = plan(*RANKS, (KEY, "1GiB"), machine=SERVER).elastic.memory_copy
    assert (asked.enabled, asked.share, asked.reason) == (True, 0.01, "at most 1% of the time")


def test_a_node_keeps_the_copies_of_another_one_too() -> None:
    own = plan(*RANKS).elastic.memory_copy.bytes
    two = (("cluster.procs_per_node", 1), ("plugin.name", "zero3"))
    several = plan(*two, ("cluster.nodes", 2)).elastic.memory_copy.bytes
    assert several == 2 * own
    later = plan(*RANKS, ("elastic.max_nodes", 2)).elastic.memory_copy.bytes
    assert later == 2 * own


@pytest.mark.parametrize("value", ["off", False, 0])
def test_they_can_be_turned_off(value: Any) -> None:
    assert not plan(*RANKS, (KEY, value)).elastic.memory_copy.enabled


def test_nothing_is_copied_for_a_run_that_is_never_restarted() -> None:
    copies = plan(*RANKS, ("elastic.max_restarts", 0)).elastic.memory_copy
    assert (copies.enabled, copies.reason) == (False, "off (elastic.max_restarts=0)")


def test_a_size_copies_every_step_or_is_refused() -> None:
    need = 2 * plan(*RANKS).elastic.memory_copy.bytes
    copies = plan(*RANKS, (KEY, need)).elastic.memory_copy
    assert (copies.enabled, copies.share) == (True, 0.0)
    low = one_line(*RANKS, (KEY, need - 1))
    assert low.startswith(f"{KEY}={need - 1}: expected at least 5.5 MiB: two copies of the state")
    small = replace(LAPTOP, host_memory_bytes=2 * plan(*RANKS).peak.high)
    assert "do not fit beside the ranks" in one_line(*RANKS, (KEY, "1GiB"), machine=small)
    assert "expected auto, off, bytes, a size like" in one_line(*RANKS, (KEY, "often"))


def test_a_run_that_rolls_back_has_checkpoints_alone() -> None:
    """A restart from memory would change which checkpoint it goes back to."""
    rolls = ("train.on_nonfinite", "rollback")
    assert not plan(*RANKS, rolls).elastic.memory_copy.enabled
    assert "expected auto or off with rollback" in one_line(*RANKS, rolls, (KEY, "1GiB"))
