"""New heads: which classes and which padding token a plan has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colotrain.config.schema import Classify, Config, Data, Model, Train
from colotrain.errors import Problem
from colotrain.planner.heads import check_brought_head, classes_of, padding_id, states_order


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


def test_named_classes_rename_those_of_a_classifier_and_move_none(tmp_path: Path) -> None:
    """The rows of its head stay where they are."""
    known = {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0", "1": "no"},
    }

    def found(*named: str) -> tuple[tuple[str, ...], list[str]]:
        problems: list[Problem] = []
        made = settings(tmp_path, known)
        made.train.classify.classes[:] = named
        return classes_of(made, problems), [str(problem) for problem in problems]

    assert found("yes", "no") == (("yes", "no"), [])
    assert found("yes", "never") == (("yes", "never"), [])
    _, (problem,) = found("no", "yes")
    assert problem.startswith("train.classify.classes=no, yes: expected the model's own classes in")


def test_numbers_are_labels_where_the_order_of_the_classes_is_stated(tmp_path: Path) -> None:
    known = {"architectures": ["LlamaForSequenceClassification"]}
    known |= {"id2label": {"0": "yes", "1": "no"}}

    def found(config: dict[str, Any], labels: list[Any], *named: str) -> tuple[Any, bool, str]:
        problems: list[Problem] = []
        made = settings(tmp_path, config)
        made.train.classify.classes[:] = named
        lines = [json.dumps({"text": "a", "label": label}) + "\n" for label in labels]
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        classes = classes_of(made, problems)
        return classes, states_order(made, classes), "".join(map(str, problems))

    assert found({}, ["bad", "good"]) == (("bad", "good"), False, "")
    assert found({}, [0, 1], "bad", "good") == (("bad", "good"), True, "")
    assert found(known, [1, "0"]) == (("yes", "no"), True, "")
    assert found(known, [0, 2])[2].startswith("model.hf: expected a model whose classes")
    mixed = found({}, ["0", 1, "bad", "good"])[2]
    assert mixed.startswith("train.classify.classes=: expected the names of the classes in their")
    assert "numbers (0, 1) and others names (bad, good)" in mixed


@pytest.mark.parametrize("config", [[], 3, {"id2label": {"a": "b"}, "architectures": ["x"]}])
def test_a_configuration_of_another_form_is_left_to_whoever_builds_the_model(
    tmp_path: Path, config: Any
) -> None:
    if isinstance(config, dict):
        config["architectures"] = ["LlamaForSequenceClassification"]
    problems: list[Problem] = []
    assert classes_of(settings(tmp_path, config), problems) == ("no", "yes")
    assert not problems


def test_a_head_of_an_adapters_directory_needs_the_names_of_its_classes(tmp_path: Path) -> None:
    made = settings(tmp_path, {})
    (problem,) = check_brought_head(made, ("model.embed", "score"))
    assert problem.key == "train.classify.classes"
    assert not list(check_brought_head(made, ("model.embed",)))
    made.train.classify.classes[:] = ["no", "yes"]
    assert not list(check_brought_head(made, ("score",)))


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
