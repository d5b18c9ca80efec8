"""Marks of a chat template that are no tokens of the tokenizer are told."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models

from colotrain.data.prepare.templates import unknown_marks

TEMPLATE = "{{ '<|im_start|>' + messages[0].role + '<|im_end|>' }}<start_of_turn>[INST] <b> <|"


def test_marks_that_are_no_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens(["<|im_end|>", "[INST]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert unknown_marks(TEMPLATE, tmp_path) == ["<|im_start|>", "<start_of_turn>"]
    assert unknown_marks("no marks: {{ messages }}", tmp_path) == []
