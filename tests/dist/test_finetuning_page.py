"""docs/finetuning.md, followed as it stands: every file made, every command run, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import Colotrain
from tests.following import Follower

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_can_be_followed(colotrain: Colotrain) -> None:
    follower = Follower(colotrain, PAGE, colotrain.cwd)
    follower.follow()
    assert len(follower.ran) == 28

    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(colotrain.cwd / name)

    tokenizer = transformers.AutoTokenizer.from_pretrained(colotrain.cwd / "all-hf")
    for name in ("all-hf", "lora-merged", "chat-hf", "qlora-merged"):
        ids = tokenizer("def train(", return_tensors="pt")["input_ids"]
        assert load(name).generate(ids, max_new_tokens=4, do_sample=False).shape[1] == 14
    processor = transformers.AutoProcessor.from_pretrained(colotrain.cwd / "seen-hf")
    assert processor.image_token == "<image>"
    assert str(load("lora-merged").dtype) == "torch.bfloat16"
    sizes = [
        sum(f.stat().st_size for f in colotrain.rundir(run).checkpoints.rglob("*") if f.is_file())
        for run in ("lora", "all")
    ]
    assert sizes[0] < sizes[1] / 3
