"""torch's own messages about workers go to a file, not between our lines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch  # noqa: F401  (whose handlers write to stderr)

from colotrain.launch.agent import LOGGERS, torch_logs_to


@pytest.mark.parametrize("name", [*LOGGERS, f"{LOGGERS[0]}.agent.server.api"])
def test_messages_of_torch_are_in_a_file_and_not_on_the_terminal(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "torch.log"
    with torch_logs_to(file):
        logging.getLogger(name).warning("Terminating process %s via signal SIGTERM", 7)
    assert f"WARNING {name}: Terminating process 7 via signal SIGTERM" in file.read_text()
    assert capfd.readouterr().err == ""
    assert caplog.records == []
    logging.getLogger(name).warning("afterwards")
    assert "afterwards" not in file.read_text()
    assert [record.message for record in caplog.records] == ["afterwards"]


def test_a_file_that_cannot_be_written_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch_logs_to(tmp_path / "missing" / "torch.log"):
        logging.getLogger(LOGGERS[1]).warning("lost")
    assert capfd.readouterr().err == ""
