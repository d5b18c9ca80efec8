"""docs/finetuning.md, followed as it stands: every file made, every command run, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import Colotrain

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_can_be_followed(colotrain: Colotrain) -> None:
    commands = 0
    for language, body in BLOCK.findall(PAGE.read_text("utf-8")):
        if language != "bash":
            named = colotrain.cwd / body.splitlines()[0].removeprefix("# ")
            named.parent.mkdir(exist_ok=True)
            named.write_text(body)
            continue
        for words in (shlex.split(line) for line in body.splitlines()):
            commands += 1
            if words[0] == "python":
                subprocess.run([sys.executable, *words[1:]], cwd=colotrain.cwd, check=True)
            else:
                result = colotrain(*words[1:])
                assert result.code == 0, f"{words}: {result.err}"
    assert commands == 8

    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(colotrain.cwd / name)

    tokenizer = transformers.AutoTokenizer.from_pretrained(colotrain.cwd / "all-hf")
    for name in ("all-hf", "lora-merged"):
        ids = tokenizer("def train(", return_tensors="pt")["input_ids"]
        assert load(name).generate(ids, max_new_tokens=4, do_sample=False).shape[1] == 14
    assert str(load("lora-merged").dtype) == "torch.bfloat16"
    sizes = [
        sum(f.stat().st_size for f in colotrain.rundir(run).checkpoints.rglob("*") if f.is_file())
        for run in ("lora", "all")
    ]
    assert sizes[0] < sizes[1] / 3
