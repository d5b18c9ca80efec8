"""What starting a run must not do: each costs every worker, or every `plan`, a part of a second."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from colotrain.engine import grouping
from colotrain.models.llm import LLM


def test_the_groups_are_found_with_one_trial_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = 0
    trial = grouping._trial

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal trials
        trials += 1
        return trial(*args, **kwargs)

    monkeypatch.setattr(grouping, "_trial", counted)
    with torch.device("meta"):
        model = LLM(vocab_size=32, d_model=64, num_layers=5, num_heads=1)
    ids = torch.zeros(1, 8, dtype=torch.long)
    groups = grouping.find_groups(model, chunk_bytes=None, batch={"input_ids": ids, "labels": ids})
    assert [name for name, _ in groups] == [f"blocks.{n}" for n in range(5)]
    assert trials == 1


def test_building_a_model_on_paper_does_not_load_the_compiler() -> None:
    code = (
        "import sys\n"
        "from colotrain.models.loading import build_on_meta\n"
        "from colotrain.plan import ModelPlan\n"
        "args = dict(vocab_size=32, d_model=64, num_layers=2, num_heads=1)\n"
        "plan = ModelPlan(target='colotrain.models.llm:LLM', args=args, hf=None, adapter=None)\n"
        "model = build_on_meta(plan)\n"
        "assert model is not None and all(p.is_meta for p in model.parameters())\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
