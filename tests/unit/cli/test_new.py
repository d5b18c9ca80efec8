"""`colotrain new` looks at a model and data, and writes a recipe that is a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from colotrain.cli.main import guarded
from colotrain.runs.resolving import plan_from

MODEL = [
    "model.target=colotrain.models.llm:LLM",
    "model.args={vocab_size:256,d_model:16,num_layers:1,num_heads:2,d_hidden:32}",
]
DATA = ["data.path=chats.jsonl", "data.tokenizer=bytes", "data.chat_template=chatml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red" * 9}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 1200)
    return tmp_path


def test_a_recipe_says_what_was_found_and_is_a_plan(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["new", "chat", *MODEL, *DATA, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    text = (folder / "recipes/chat.yaml").read_text()
    recipe = yaml.safe_load(text)
    longest = int(re.search(r"to (\d+) tokens", text)[1])  # type: ignore[index]
    assert recipe["data"]["seq_len"] in range(longest, longest + 8)
    assert recipe["train"] == {"epochs": 1, "global_batch": 16, "micro_batch": "auto"}
    assert recipe["model"]["args"]["d_model"] == 16
    plan = plan_from(["recipe=chat"])
    assert printed["plan"] == {"plugin": plan.plugin.name, "max_steps": plan.train.max_steps}
    assert not printed["problems"]


def test_each_offer_in_its_comments_can_be_taken(folder: Path) -> None:
    assert guarded(["new", "chat", *MODEL, *DATA]) == 0
    lines = (folder / "chats.jsonl").read_text().splitlines()
    (folder / "validation.jsonl").write_text("\n".join(lines[:40]))
    path = folder / "recipes/chat.yaml"
    head, _, rest = path.read_text().partition("\n\n")
    path.write_text(f"{head}\n\n" + re.sub(r"^( *)# ", r"\1", rest, flags=re.MULTILINE))
    plan = plan_from(["recipe=chat"])
    assert plan.model.adapter is not None
    assert plan.checkpoint.every == 200
    assert plan.train.eval_every == 50
    assert [Path(p).name for p in plan.data.validation_paths] == ["validation.jsonl"]


def test_what_is_given_is_kept_and_a_file_that_is_there_too(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [
        "plugin=zero3",
        "plugin.reshard=true",
        "train.max_steps=7",
        "optim.lr=0.5",
        "train.micro_batch=2",
    ]
    assert guarded(["new", "mine", *MODEL, *DATA, *given]) == 0
    path = folder / "recipes/mine.yaml"
    recipe = yaml.safe_load(path.read_text())
    assert (recipe["plugin"], recipe["optim"]) == (
        {"reshard": True, "name": "zero3"},
        {"lr": 0.5},
    )
    assert "epochs" not in recipe["train"]
    before = path.read_text()
    assert guarded(["new", "mine", *MODEL, *DATA]) == 2
    assert "exists" in capfd.readouterr().err
    assert path.read_text() == before


def test_all_that_is_missing_is_told_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["new", "chat"]) == 2
    told = capfd.readouterr().err
    assert "model.hf=DIRECTORY" in told
    assert "data.path=FILE" in told
    assert guarded(["new", "../chat", *MODEL, *DATA]) == 2
    assert guarded(["new", "chat.yaml", *MODEL, *DATA]) == 2
    assert guarded(["new", "chat", "recipe=llm-tiny", *MODEL, *DATA]) == 2
    assert not (folder / "recipes").exists()


def test_a_plan_that_cannot_be_is_told_and_the_recipe_written(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["new", "chat", *MODEL, *DATA, "freeze.patterns=[none.of.them]"]) == 0
    assert "to be corrected first" in capfd.readouterr().err
    assert (folder / "recipes/chat.yaml").exists()


def test_colotrain_alone_says_what_comes_next(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded([]) == 0
    assert "colotrain run recipe=llm-tiny" in capfd.readouterr().out
    assert guarded(["new", "chat", *MODEL, *DATA]) == 0
    capfd.readouterr()
    assert guarded([]) == 0
    out = capfd.readouterr().out
    assert "colotrain plan recipe=chat" in out
    assert "colotrain new" not in out


def test_data_inspect_asks_for_no_size_of_batches(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["data", "inspect", *MODEL, *DATA, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["samples"]["train"] > 1000
