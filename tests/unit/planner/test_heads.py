"""New heads: which classes and which padding token a plan has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colotrain.config.schema import Classify, Config, Data, Model, Train
from colotrain.errors import Problem
from colotrain.planner.heads import classes_of, padding_id


def settings(folder: Path, config: dict[str, Any], **model: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "a", "label": name}) + "\n" for name in ("no", "yes"))
    )
    return Config(
        model=Model(hf=str(folder), **model),
        data=Data(path=str(folder / "rows.jsonl"), tokenizer="bytes"),
        train=Train(objective="classify", classify=Classify(classes=[])),
    )


def test_a_classifier_keeps_its_classes_and_another_model_gets_those_of_the_data(
    tmp_path: Path,
) -> None:
    problems: list[Problem] = []
    names = {"0": "yes", "1": "no", "2": "maybe"}
    known = {"architectures": ["LlamaForSequenceClassification"], "id2label": names}
    assert classes_of(settings(tmp_path, known), problems) == ("yes", "no", "maybe")
    causal = {"architectures": ["LlamaForCausalLM"], "id2label": {"0": "LABEL_0"}}
    assert classes_of(settings(tmp_path, causal), problems) == ("no", "yes")
    assert not problems
    classes_of(settings(tmp_path, {**known, "id2label": {"0": "yes", "1": "maybe"}}), problems)
    assert "no is none of its classes" in str(problems[0])


@pytest.mark.parametrize(
    ("config", "args", "expected"),
    [
        ({"pad_token_id": 5}, {"pad_token_id": 9}, 9),
        ({"pad_token_id": 5}, {}, 5),
        ({"text_config": {"pad_token_id": 3}}, {}, 3),
        ({}, {}, 0),
    ],
)
def test_the_padding_token_is_the_models_or_else_the_end_of_text(
    tmp_path: Path, config: dict[str, Any], args: dict[str, Any], expected: int
) -> None:
    problems: list[Problem] = []
    assert padding_id(settings(tmp_path, config, args=args), problems) == expected
    assert not problems
