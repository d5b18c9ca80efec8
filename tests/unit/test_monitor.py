"""How far a step is, and the entry by which anything in a worker ends the run."""

from __future__ import annotations

import pytest

from colotrain.engine.monitor import share_of_micro_batch


@pytest.mark.parametrize(
    ("num_calls", "recomputes", "forward_only", "share"),
    [
        (0, False, False, 0.0),
        (5, True, True, 1.0),
        (5, False, False, 1 / 3),
        (5, True, False, 1 / 4),
        (7, True, False, 1 / 4 + 3 / 8),
        (9, True, False, 1.0),
        (99, True, False, 1.0),
    ],
)
def test_the_share_of_a_micro_batch_follows_the_groups_that_were_called(
    num_calls: int, recomputes: bool, forward_only: bool, share: float
) -> None:
    found = share_of_micro_batch(num_calls, 5, recomputes=recomputes, forward_only=forward_only)
    assert found == pytest.approx(share)


def test_a_model_without_groups_has_no_share() -> None:
    assert share_of_micro_batch(3, 0, recomputes=False, forward_only=False) == 0.0
