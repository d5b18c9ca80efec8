"""How far a long step is."""

from __future__ import annotations

import pytest

from colotrain.engine.monitor import ALMOST, share_of_micro_batch


@pytest.mark.parametrize(
    ("forward", "forwards", "recomputes", "share"),
    [
        (0.0, 0.0, False, 0.0),
        (0.5, 0.0, False, 1 / 6),
        (0.5, 0.0, True, 1 / 8),
        (1.0, 1.0, True, 1 / 4),
        (1.0, 2.0, False, 2 / 3),
        (1.0, 2.0, True, 1 / 2),
        (1.0, 7.0, False, ALMOST),
    ],
)
def test_the_share_of_a_micro_batch_follows_its_forward(
    forward: float, forwards: float, recomputes: bool, share: float
) -> None:
    found = share_of_micro_batch(forward, forwards, recomputes=recomputes, forward_only=False)
    assert found == pytest.approx(share)


def test_an_evaluation_has_no_backward() -> None:
    found = share_of_micro_batch(0.5, 0.0, recomputes=True, forward_only=True)
    assert found == pytest.approx(0.5)
