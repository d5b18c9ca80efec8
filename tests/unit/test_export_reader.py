"""The reader of an export runs no code of the directory that it reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from colotrain.data.prepare import templates
from colotrain.export import prompting, reader

RAN = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.mark.parametrize("architecture", ["AutoModelForCausalLM", "pipeline", "LlamaForCausalLM"])
def test_code_beside_the_weights_is_not_run(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder, ran = tmp_path / "given", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(RAN.format(str(ran)), "utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    config = {"model_type": "evil", "architectures": [architecture], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    problems: list[str] = []
    assert reader.load_model(folder, {}, problems) is None
    assert len(problems) == 1
    assert not ran.exists()


def test_a_template_without_an_end_is_left_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*args: object, **kwargs: object) -> str:
        while True:
            pass

    monkeypatch.setattr(templates, "SECONDS", 0.2)
    began = time.thread_time()
    assert prompting._after_answer(SimpleNamespace(apply_chat_template=render)) is None
    assert time.thread_time() - began < 5
