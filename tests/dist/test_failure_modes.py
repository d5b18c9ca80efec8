"""The page of failure modes: its lines, put into its script, have the faults that it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from colotrain.audit.checks import check
from colotrain.audit.command import START
from colotrain.audit.evidence import evidence
from colotrain.rundir import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "failure-modes.md"
BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTIONS = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
)
SCRIPT, OF_RANKS = BLOCK.findall(PAGE.read_text("utf-8"))[:2]
LINES = {title: found[0] for title, text in SECTIONS.items() if (found := BLOCK.findall(text))}
OF_DEEPSPEED = {title for title, lines in LINES.items() if "engine." in lines}
"""Those are audited in `test_audit_peers`, where DeepSpeed is installed."""
FAULTS = sorted(LINES.keys() - OF_DEEPSPEED)


def ranks_of(lines: str) -> int:
    return 2 if re.search(r"\b(dist|ddp|rank|fully_shard)\b", lines) else 1


def script_of(lines: str) -> str:
    """Put lines into the page's script, by the page's own rules."""
    before, loop = SCRIPT.split("for step in range", 1)
    if ranks_of(lines) > 1:
        before += OF_RANKS
    *first, body = lines.split("\n\n")
    before = "".join(["import torch\ntorch.manual_seed(0)\n", before, *(f"{p}\n" for p in first)])
    if re.search(r"\b(batches|loader)\b", body) and "micro_batches" not in body:
        return before + body
    return before + "for step in range" + loop.replace("    ...\n", indent(body, "    "))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, cases = tmp_path_factory.mktemp("pages"), []
    for number, title in enumerate(FAULTS):
        script = folder / f"{number}.py"
        script.write_text(script_of(LINES[title]), "utf-8")
        cases.append([f"run-{number}", ranks_of(LINES[title]), str(script)])
    environment = {"PYTHONPATH": str(START), "COLOTRAIN_AUDIT": str(folder), "OMP_NUM_THREADS": "1"}
    many = [sys.executable, Path(__file__).with_name("audited_many.py"), folder, json.dumps(cases)]
    done = subprocess.run(many, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {
        title: {v.check: v for v in check(evidence(RunDir(folder / name)))}
        for title, (name, *_) in zip(FAULTS, cases, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("title", FAULTS)
def test_lines_of_the_page_are_found_by_the_check_that_it_names(
    verdicts: dict[str, Any], title: str
) -> None:
    (name,) = re.findall(r"check `(\w+)`", SECTIONS[title])
    assert verdicts[title][name].outcome == "wrong", verdicts[title]


@pytest.mark.slow
def test_the_script_without_a_fault_has_none(tmp_path: Path) -> None:
    right = (
        "for x, y in micro_batches:\n    (mse_loss(net(x), y) / 4).backward()\noptimizer.step()\n"
    )
    (tmp_path / "right.py").write_text(script_of(right), "utf-8")
    environment = {"PYTHONPATH": str(START), "COLOTRAIN_AUDIT": str(tmp_path)}
    many = Path(__file__).with_name("audited_many.py")
    cases = json.dumps([["run", 1, str(tmp_path / "right.py")]])
    command = [sys.executable, many, tmp_path, cases]
    subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
    found = check(evidence(RunDir(tmp_path / "run")))
    assert {v.outcome for v in found} == {"ok"}, found
