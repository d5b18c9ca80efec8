"""`benchmarks/gpu` runs, here on a CPU: what it measures is for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"


def gpu(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As on a machine where colotrain is not installed: found by its folder."""
    where = ("--out", str(folder / "out"), "--work", str(folder / "work"))
    return subprocess.run(
        [sys.executable, str(KIT), *where, *arguments],
        cwd=folder,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def rows(folder: Path) -> dict[str, dict[str, object]]:
    lines = (folder / "out" / "results.jsonl").read_text("utf-8").splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_cases_are_set_beside_the_cpu_and_steps_are_timed(tmp_path: Path) -> None:
    asked = ("fsdp-hybrid", "lora", "plain", "1b", "kill")
    done = gpu(tmp_path, "--device", "cpu", "--seconds", "900", "--only", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path)
    assert {"cpu", "cpu lora", *asked} == found.keys()
    assert found["lora"]["gradient_off"] < 1e-3  # type: ignore[operator]
    assert found["1b"]["tokens_per_s"] > 0  # type: ignore[operator]
    assert len(found["plain"]["losses"]) == 12  # type: ignore[arg-type]
    assert found["kill"]["next_step_after_s"] > 0  # type: ignore[operator]
    assert done.stdout.splitlines()[-1] == "failed: none"


def test_a_wrong_loss_fails_by_name(tmp_path: Path) -> None:
    sys.path.insert(0, str(KIT))
    try:
        import cases
    finally:
        sys.path.remove(str(KIT))
    of_cpu = cases.Case(name="cpu", words=(), on="cpu", group="cpu 0")
    case = cases.Case(name="zero1", words=(), on="cpu", group="plugins", like="cpu")
    gradient = {"embed.weight": torch.ones(3)}
    for name, loss, grown in (("cpu", 5.0, 1.0), ("zero1", 5.0, 1.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"losses": [loss]}))
        torch.save({k: v * grown for k, v in gradient.items()}, tmp_path / f"{name}.gradients.pt")
    assert "failed" not in cases.judge(of_cpu, tmp_path)
    assert "failed" not in cases.judge(case, tmp_path)
    torch.save({"embed.weight": torch.ones(3) * 1.01}, tmp_path / "zero1.gradients.pt")
    assert cases.judge(case, tmp_path)["failed"].startswith("the gradient of embed.weight")
    (tmp_path / "zero1.json").write_text(json.dumps({"losses": [5.1]}))
    assert cases.judge(case, tmp_path)["failed"] == "a loss is more than 0.0001 off"
    (tmp_path / "zero1.json").write_text(json.dumps({"losses": []}))
    assert cases.judge(case, tmp_path)["failed"] == "0 losses, 1 of cpu"


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = gpu(tmp_path, "--device", "cpu", "--only", "zero9")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only zero9: expected of: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = gpu(tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch finds no GPU")
    assert list(tmp_path.iterdir()) == []
