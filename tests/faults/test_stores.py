"""Killed at random moments, a run whose checkpoints go to a failing S3 server loses none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.s3 import Proxy, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 36


def test_a_killed_run_goes_on_from_a_server_that_fails(tmp_path: Path) -> None:
    for module in ("boto3", "moto.server", "s3fs"):
        pytest.importorskip(module)
    from tests.faults import store_kills as kills

    expected = kills.straight(tmp_path / "straight", STEPS)
    with server() as port, Proxy(port, delay_s=0.02, failing=0.05) as proxy:
        found, happened, counts = kills.inflict(
            tmp_path,
            "killed",
            random.Random(6),
            kills=3,
            steps=STEPS,
            proxy=proxy,
            on_server=kills.Server(port),
        )
    assert found == expected
    assert happened
    assert counts["checkpoints checked"]
    assert proxy.failed
