"""Names of the Hub in settings become folders of its cache, against a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colotrain.errors import ConfigError
from colotrain.runs import hub
from colotrain.runs.resolving import plan_from
from tests.hub import COMMIT, serving

constants = pytest.importorskip("huggingface_hub.constants")
WORDS = (
    *("data.corpus=stdlib", "data.tokenizer=bytes", "data.seq_len=16"),
    *("plugin=zero3", "train.micro_batch=2"),
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model directory, with what must not be downloaded beside it."""
    from tests.families import CAUSAL

    folder = CAUSAL[0].make(tmp_path / "made")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_text("a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_text("the same again")
    return folder


@pytest.fixture
def asked(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that the Hub was asked for, of which this process knows no other."""
    with serving({"org/tiny": repository}, gated=("meta/gated",)) as (address, paths):
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield paths


def composed(**settings: Any) -> dict[str, Any]:
    return {"model": {"hf": None, "revision": None, **settings}, "data": {"tokenizer": "bytes"}}


def problems(config: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in hub.with_folders_(config, [])]


def test_a_name_is_downloaded_once_and_becomes_the_folder_of_a_commit(
    asked: list[str], tmp_path: Path
) -> None:
    config, notices = composed(hf="org/tiny"), list[str]()
    assert not list(hub.with_folders_(config, notices))
    folder = Path(config["model"]["hf"])
    assert folder.name == COMMIT
    assert tmp_path / "cache" in folder.parents
    assert notices == [f"model.hf=org/tiny: commit {COMMIT}"]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
    assert not [
        path for path in asked if path.endswith((".py", ".bin", "consolidated.safetensors"))
    ]
    asked.clear()
    assert not problems(again := composed(hf="org/tiny"))
    assert again["model"]["hf"] == str(folder)
    assert not [path for path in asked if "/resolve/" in path]


def test_without_a_network_what_the_cache_has_is_taken(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not problems(composed(hf="org/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked.clear()
    config = composed(hf="org/tiny")
    assert not problems(config)
    assert Path(config["model"]["hf"]).name == COMMIT
    (line,) = problems(composed(hf="org/other"))
    assert "HF_HUB_OFFLINE is set" in line
    assert not asked


def test_a_plan_has_the_commit_and_is_called_by_the_name(asked: list[str]) -> None:
    plan = plan_from(["model.hf=org/tiny", f"model.revision={COMMIT}", *WORDS])
    assert str(plan.model.hf).endswith(f"models--org--tiny/snapshots/{COMMIT}")
    assert plan.name.startswith("tiny-zero3-")


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"hf": "org/none"}, "model.hf=org/none", "look for it at"),
        ({"hf": "meta/gated"}, "model.hf=meta/gated", "ask for access at"),
        ({"hf": "org/tiny", "revision": "v9"}, "model.revision=v9", "a branch, tag or commit of"),
        ({"hf": ".", "revision": "v9"}, "model.revision=v9", "none beside a directory"),
    ],
)
def test_what_the_hub_has_not_is_one_line(
    asked: list[str], settings: dict[str, Any], key: str, words: str
) -> None:
    (line,) = problems(composed(**settings))
    assert line.startswith(key)
    assert words in line
    given = [f"model.{name}={value}" for name, value in settings.items() if value != "."]
    if "model.hf" in " ".join(given):
        with pytest.raises(ConfigError) as found:
            plan_from([*given, *WORDS])
        assert len(found.value.problems) == 1


def test_other_mistakes_are_told_before_anything_is_downloaded(asked: list[str]) -> None:
    wrong = ("optim.lr=-1", "optim.bettas=[0.9]", "model.quantize=nf4")
    with pytest.raises(ConfigError) as found:
        plan_from(["model.hf=org/tiny", *WORDS, *wrong])
    keys = [problem.key for problem in found.value.problems]
    assert sorted(keys) == ["adapter.name", "optim.bettas", "optim.lr"]
    assert not asked


def test_too_little_space_is_told_before_anything_is_downloaded(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: usage(1, 1, 1))
    (line,) = problems(composed(hf="org/tiny"))
    assert "to download" in line
    assert not [path for path in asked if path.startswith("GET") and "/resolve/" in path]


def test_folders_and_other_words_are_left_as_they_are(asked: list[str]) -> None:
    Path("org/tiny").mkdir(parents=True)
    for value in ("org/tiny", "org/deeper", "/org/tiny", "a/b/c", "./org/tiny", "bytes"):
        config = composed(hf=value)
        assert not problems(config)
        assert config["model"]["hf"] == value
    assert not asked
