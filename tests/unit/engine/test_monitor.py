"""How far a long step is."""

from __future__ import annotations

from pathlib import Path

import pytest

from colotrain.engine.state.run_state import Run
from colotrain.engine.step.monitor import ALMOST, share_of_micro_batch
from colotrain.events.heartbeats import HeartbeatWriter, read_heartbeats
from colotrain.spec.phases import Phase


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


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        (Phase.COMPUTE, 5),
        (Phase.EVALUATION, 4),
        (Phase.TEXT_SAMPLES, 4),
        (Phase.CHECKPOINT, 4),
    ],
)
def test_an_evaluation_belongs_to_the_step_before_it(
    phase: Phase, step: int, tmp_path: Path
) -> None:
    run = Run.__new__(Run)
    run.step, run.heartbeat = 4, HeartbeatWriter(tmp_path / "rank0.json")
    run.at(phase)
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step, beat.where) == (phase, step, f"{phase} of step {step}")
    run.heartbeat.stage = 1
    run.at(phase)
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step, beat.where) == (phase, step, f"{phase} (stage 1) of step {step}")
