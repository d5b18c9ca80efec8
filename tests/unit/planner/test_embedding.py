"""The pooling of a model of embeddings is what the files of sentence-transformers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colotrain.errors import Problem
from colotrain.planner.embedding import OtherModules, embed_plan, pooling_of
from colotrain.spec.objectives import Embed
from tests.embedders import write_modules


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last"), ("cls_token", "cls")]
)
def test_older_files_name_each_mode(tmp_path: Path, mode: str, pooling: str) -> None:
    write_modules(tmp_path, mode)
    assert pooling_of(tmp_path) == pooling


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [({"pooling_mode": "lasttoken"}, "last"), ({"pooling_mode": ["mean"]}, "mean")],
)
def test_newer_files_have_one_key(tmp_path: Path, settings: dict[str, Any], pooling: str) -> None:
    write_modules(tmp_path, "cls_token")
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(settings))
    assert pooling_of(tmp_path) == pooling


@pytest.mark.parametrize("modes", [["mean", "max"], ["max"], []])
def test_other_poolings_are_refused(tmp_path: Path, modes: list[str]) -> None:
    write_modules(tmp_path, "none of them")
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": modes}))
    with pytest.raises(OtherModules):
        pooling_of(tmp_path)


def planned(folder: Path | None, **settings: Any) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    return embed_plan(Embed(**settings), folder and str(folder), problems), problems


def test_a_directory_and_the_setting_agree_or_one_of_them_says_it(tmp_path: Path) -> None:
    assert planned(None) == (None, [])
    assert planned(tmp_path)[1][0].key == "train.embed.pooling"
    assert planned(tmp_path, pooling="cls")[0].pooling == "cls"
    write_modules(tmp_path, "mean_tokens")
    assert planned(tmp_path, scale=5.0)[0] == planned(tmp_path, pooling="mean", scale=5.0)[0]
    assert planned(tmp_path, pooling="cls")[1][0].key == "train.embed.pooling"
    write_modules(tmp_path, "mean_tokens", "Dense")
    assert "it has a Dense" in planned(tmp_path)[1][0].expected
    (tmp_path / "modules.json").write_text("{}")
    assert planned(tmp_path)[1][0].key == "train.embed.pooling"
    (tmp_path / "modules.json").write_text("[1]")
    assert planned(tmp_path)[1][0].key == "model.hf"
