"""A stage that dies or hangs is named, and the run goes on as if nothing had been."""

from __future__ import annotations

import pytest

from tests.faults.test_faults import PLAN, causes, environment, planted
from tests.running import Colotrain, losses

STAGED = ("mesh.pp=2", "elastic.hang_timeout_s=6")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("kill", "rank 1 was killed by SIGKILL"),
        ("hang", " (stage 1) of step 6"),
        ("stop", " (stage 1) of step 6"),
    ],
)
def test_a_stage_that_dies_or_falls_silent_is_named_and_the_run_restarted(
    colotrain: Colotrain, what: str, says: str
) -> None:
    straight = colotrain("run", *PLAN, *STAGED, "name=straight", "--json", env=environment())
    result = planted(colotrain, what, *STAGED)
    assert result.code == 0, result.err
    [cause] = causes(colotrain)
    assert says in cause
    assert "rank 1" in cause
    assert "rank 0" not in cause
    assert losses(result.json) == losses(straight.json)
