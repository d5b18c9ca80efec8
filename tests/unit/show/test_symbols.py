"""What outputs without Unicode get of charts and tables."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colotrain.show.symbols import TO_ASCII


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "4 x 2 ## > ?"), ("latin-1", "4 × 2 ## > ?")]
)
def test_symbols_that_an_encoding_lacks_are_written_in_ascii(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, errors=TO_ASCII, write_through=True) as stream:
        stream.write("4 × 2 ██ → 火")
        assert raw.getvalue().decode(encoding) == shown


def test_a_plan_has_no_question_marks_for_bars_on_an_ascii_output(tmp_path: Path) -> None:
    environment = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    done = subprocess.run(
        [sys.executable, "-m", "colotrain", "plan", "recipe=llm-tiny"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=200,
    )
    shown = done.stdout.decode("ascii")
    assert done.returncode == 0
    assert "###" in shown
    assert "?" not in shown
