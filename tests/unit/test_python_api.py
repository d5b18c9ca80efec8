"""The Python API leaves a script's random numbers and environment as they were."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colotrain
from colotrain.runs import start

SCRIPT = """
import random
import sys
import colotrain

random.seed(3)
assert "rich" not in sys.modules
colotrain.resolve(["recipe=llm-tiny"])
assert "rich" in sys.modules
print(random.random())
"""


def test_the_first_plan_of_a_script_draws_none_of_its_random_numbers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == random.Random(3).random()


def test_a_run_s_environment_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_BY_A_RUN", "mine")
    monkeypatch.delenv("SET_BY_A_RUN", raising=False)
    before = dict(os.environ)

    def run_quietly(overrides: list[str], **options: Any) -> dict[str, Any]:
        os.environ |= {"CHANGED_BY_A_RUN": "its", "SET_BY_A_RUN": "its"}
        del os.environ["PATH"]
        random.random()
        raise ValueError(*overrides)

    monkeypatch.setattr(start, "run_quietly", run_quietly)
    random.seed(3)
    with pytest.raises(ValueError, match="recipe=mine"):
        colotrain.run(["recipe=mine"])
    assert dict(os.environ) == before
    assert random.random() == random.Random(3).random()
