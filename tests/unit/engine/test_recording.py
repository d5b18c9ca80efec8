"""A loss spike is noticed once the range is known, and ordinary noise is not."""

import math
import random

from colotrain.engine.step.recording import MIN_STEPS, LossSpikes, SkippedSteps


def test_noise_around_a_falling_loss_is_no_spike() -> None:
    draw = random.Random()
    spikes = LossSpikes()
    losses = [3.0 - step / 1000 + draw.uniform(-0.05, 0.05) for step in range(500)]
    assert [spikes.check(loss) for loss in losses] == [None] * 500


def test_a_jump_is_named_with_its_size() -> None:
    spikes = LossSpikes()
    for step in range(MIN_STEPS):
        spikes.check(2.0 + 0.01 * (step % 2))
    warning = spikes.check(5.0)
    assert warning is not None
    assert warning.startswith("loss 5.0000 is ")
    assert spikes.check(2.0) is None


def test_nothing_is_said_before_the_range_is_known() -> None:
    spikes = LossSpikes()
    assert [spikes.check(loss) for loss in (1.0, 1.0, 50.0)] == [None, None, None]


def test_a_loss_that_is_not_finite_is_not_of_the_range() -> None:
    spikes = LossSpikes()
    losses = [2.0 + 0.01 * (step % 2) for step in range(MIN_STEPS)]
    for loss in (*losses, math.nan, math.inf):
        assert spikes.check(loss) is None
    assert spikes.check(2.0) is None
    assert spikes.check(5.0) is not None


def test_steps_that_are_mostly_skipped_are_told_once() -> None:
    steps = SkippedSteps()
    told = [steps.check(step % 3 != 0, searching=False) for step in range(60)]
    assert [step for step, text in enumerate(told) if text] == [16]
    assert str(told[16]).startswith("11 of the last 17 steps were skipped")


def test_few_skipped_steps_and_the_search_for_a_scale_are_not_told() -> None:
    steps = SkippedSteps()
    assert not any(steps.check(True, searching=True) for _ in range(16))
    assert not any(steps.check(step % 2 == 0, searching=False) for step in range(60))
