"""An error because of another rank's end is told apart, whatever code makes another one of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colotrain.engine.step.recording import record_failure
from colotrain.errors import ConfigError, Problem, UsageError
from colotrain.events.log import EventWriter
from colotrain.lost_peers import PeerLost, peer_lost_in
from colotrain.spec.exit_codes import FAILED, WORKER_USAGE
from colotrain.spec.phases import Phase

LOST = {
    "gloo": RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"),
    "nccl": RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, ncclRemoteError: A call failed"),
    "shared memory": PeerLost("Connection closed by peer: rank 1 (process 7) has gone"),
}


def failure(tmp_path: Path, error: Exception) -> tuple[int, str]:
    """Return a rank's exit code after `error`, and the error that it recorded."""
    path = tmp_path / "events.jsonl"
    code = record_failure(EventWriter(path), error, Phase.OPTIMIZER, 7)
    return code, json.loads(path.read_text())["error"]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("link", ["__cause__", "__context__"])
@pytest.mark.parametrize("kind", [UsageError, ConfigError, ValueError])
def test_the_failure_of_a_rank_that_lost_another_one_is_that(
    tmp_path: Path, lost: str, link: str, kind: type[Exception]
) -> None:
    problem = Problem(key="mine", expected="samples")
    error = ConfigError([problem]) if kind is ConfigError else kind("mine")
    setattr(error, link, LOST[lost])
    code, told = failure(tmp_path, error)
    assert code == FAILED
    assert str(LOST[lost]) in told
    assert "mine" not in told


@pytest.mark.parametrize(
    "inner",
    [
        RuntimeError("aten.frobnicate: got mixed torch.Tensor and DTensor"),
        RuntimeError("Read error in clip.mp4"),
        ConnectionRefusedError(111, "Connection refused"),
    ],
)
def test_other_errors_of_ones_own_code_are_what_they_were(tmp_path: Path, inner: Exception) -> None:
    error = UsageError("optim.name=mine:Own: it cannot update")
    error.__cause__ = inner
    code, told = failure(tmp_path, error)
    assert code == WORKER_USAGE
    assert "optim.name=mine:Own" in told


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("mine")
    error.__cause__ = error
    assert peer_lost_in(error) is None
