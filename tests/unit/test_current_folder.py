"""A run's, a model's and an export's directory is no place for code, conf files and recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from colotrain.config.compose import gather
from colotrain.config.shipped import Search, run_holding
from colotrain.current_folder import holder_of
from colotrain.dotted import import_target
from colotrain.errors import ConfigError

PLAN = json.dumps({"plugin": {}, "model": {}, "batch": {}, "cluster": {}})


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


RUNS = {
    "a plan": {"plan.json": PLAN},
    "two marks": {"signature.json": "{}", "control/stop": ""},
    "two others": {"launcher.json": "", "events/launcher.jsonl": ""},
}
MODELS = {
    "hf": {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
    "in parts": {"config.json": '{"architectures": ["A"]}', "pytorch_model.bin": ""},
    "peft": {"adapter_config.json": '{"peft_type": "LORA"}', "adapter.safetensors": ""},
    "own": {"colotrain.json": '{"model": {}}', "model.safetensors.index.json": "{}"},
}
OTHERS = {
    "a plan of something else": {"plan.json": '{"plugin": 1}'},
    "no JSON": {"plan.json": "plugin model batch cluster"},
    "one mark": {"control/stop": ""},
    "a configuration without weights": {"config.json": '{"model_type": "llama"}'},
    "tokens beside settings": {"config.json": '{"lr": 1}', "train.bin": "", "val.bin": ""},
}


@pytest.mark.parametrize("files", {**RUNS, **MODELS}.values(), ids={**RUNS, **MODELS})
def test_no_code_and_no_recipe_comes_from_a_run_or_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    own = {"mine.py": "def build(): ...", "recipes/mine.yaml": "name: mine\n"}
    write(tmp_path, files | own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(ConfigError, match=r"directory \(it has .*no modules are taken from there"):
        import_target("model.target", "mine:build")
    assert "mine" not in sys.modules
    _, (problem,) = gather(["recipe=mine"])
    assert "no recipes and conf files are taken from there" in problem.fix


@pytest.mark.parametrize("files", OTHERS.values(), ids=OTHERS)
def test_other_folders_are_places_for_code(tmp_path: Path, files: dict[str, str]) -> None:
    assert holder_of(write(tmp_path, files)) == ""


def test_a_folder_in_a_run_is_the_runs_but_for_the_copy_of_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"trackers/recipes/x.yaml": "name: x\n", "code/x.yaml": "name: x\n"}
    write(tmp_path / "run", {"plan.json": PLAN} | recipe)
    inner = tmp_path / "run" / "trackers"
    assert holder_of(inner) == f"{tmp_path / 'run'} is a run directory (it has a plan.json)"
    for folder in (tmp_path, tmp_path / "run" / "code", tmp_path / "run" / "code-1" / "deep"):
        assert holder_of(folder) == ""
    monkeypatch.chdir(inner)
    assert Search.at(inner).find("recipe/x") is None
    assert run_holding(inner / "recipes" / "x.yaml") is not None
    monkeypatch.chdir(tmp_path / "run" / "code")
    assert run_holding(Path("x.yaml")) is None
