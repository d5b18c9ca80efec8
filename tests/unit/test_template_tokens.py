"""Marks of a chat template that are no tokens of the tokenizer are told."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models

from colotrain.data.prepare.template_tokens import unknown_marks
from colotrain.runs.resolving import plan_from
from tests.dist.conftest import SMALL

TEMPLATE = "{{ '<|im_start|>' + messages[0].role + '<|im_end|>' }}<start_of_turn>[INST] <b> <|"


def test_marks_that_are_no_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens(["<|im_end|>", "[INST]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert unknown_marks(TEMPLATE, tmp_path) == ["<|im_start|>", "<start_of_turn>"]
    assert unknown_marks("no marks: {{ messages }}", tmp_path) == []


def test_a_plan_warns_of_them(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    data = (f"data.path={tmp_path}/chats.jsonl", "data.corpus=null", "data.tokenizer=bytes")
    told = plan_from([*SMALL, *data, "data.chat_template=chatml"]).warnings
    assert any("<|im_start|>, <|im_end|> of the chat template are no tokens" in w for w in told)
