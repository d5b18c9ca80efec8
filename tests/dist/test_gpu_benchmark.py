"""`benchmarks/gpu.py` runs, here on a CPU: what it measures is for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
SMALL = (
    "model.args.d_model=32",
    "model.args.num_heads=2",
    "model.args.d_hidden=64",
    "data.seq_len=32",
    "train.micro_batch=2",
)


def gpu(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_variants_are_measured_beside_plain_torch_and_a_failure_is_listed(tmp_path: Path) -> None:
    done = gpu(
        tmp_path,
        *("--device", "cpu", "--models", "llm-tiny", "--precision", "fp32", "--no-compile"),
        *("--rounds", "1", "--steps", "4", "--plugins", "zero2", "fsdp-hybrid"),
        *("--set", *SMALL, "plugin.shard_size=1"),  # which zero2 does not have
    )
    assert done.returncode == 1, done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["llm-tiny"]
    assert document["device"]["torch"] == torch.__version__
    assert document["state_bytes"] == 16 * document["parameters"]
    assert document["tokens_per_step"] == 2 * 32
    found = document["variants"]
    assert list(found) == ["torch", "zero2", "fsdp-hybrid"]
    for name in ("torch", "fsdp-hybrid"):
        (run,) = found[name]["runs"]
        assert found[name]["error"] is None
        assert run["tokens_per_s"] > 0
        assert run["peak_bytes"] > document["state_bytes"]
        assert len(run["losses"]) == 4
        assert all(4 < loss < 7 for loss in run["losses"])  # of 256 tokens drawn at random
    assert found["zero2"]["runs"] == []
    assert "plugin.shard_size" in found["zero2"]["error"]
    table = (tmp_path / "gpu.md").read_text("utf-8")
    assert table.startswith(document["device"]["name"])
    assert "| torch |" in table
    assert "| **fsdp-hybrid** |" in table
    assert "- zero2: failed: " in table
    assert table.strip() == done.stdout.strip()


def test_a_variant_that_does_not_end_is_ended(tmp_path: Path) -> None:
    done = gpu(tmp_path, "--device", "cpu", "--models", "llm-tiny", "--timeout", "0.1")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no end after 0.1 s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = gpu(tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no GPU that torch can use")
    assert list(tmp_path.iterdir()) == []
