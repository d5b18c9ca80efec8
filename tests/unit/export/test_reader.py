"""The reader of an export: it runs no code of the directory, and computes losses of one's own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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


@dataclass
class Output:
    scores: Tensor
    num_targets: int = 99


class Scores(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(x)


RETURNED = {
    "tensor": (lambda x: x, lambda found: found),
    "dict": (lambda x: {"scores": x}, lambda found: found["scores"]),
    "tuple": (lambda x: (x, x.mean()), lambda found: found[0]),
    "dataclass": (Output, lambda found: found.scores),
}
"""What forward makes of the scores, and how the loss of one's own takes them from it."""


@pytest.mark.parametrize("kind", list(RETURNED))
def test_a_loss_of_ones_own_takes_what_a_model_of_ones_own_returns(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned, scores_in = RETURNED[kind]
    batch = {"x": torch.eye(3), "labels": torch.tensor([0, 2, -100])}

    def loss(given: dict[str, Tensor], output: Any) -> Tensor:
        return functional.cross_entropy(scores_in(output), given["labels"])

    monkeypatch.setattr(reader, "imported", lambda dotted: loss)
    about = {"function": "own:loss", "ignored": -100, "is_hf": False}
    ways = reader.function_loss(Scores(returned), batch, about)
    expected = functional.cross_entropy(torch.eye(3), batch["labels"])
    assert ways[0] == (2 * expected, 2)
    assert ways[-1] == (3 * expected, 3)


def test_the_targets_of_a_mean_are_those_that_the_model_or_the_run_counts() -> None:
    batch = {"x": torch.ones(2, 3), "labels": torch.tensor([[0, 0, 1], [2, -100, 1]])}
    one = torch.tensor(1.0)
    assert [int(n) for _, n in reader.weighted(one, batch, -100)] == [5, 3, 2]
    assert [int(n) for _, n in reader.weighted(one, batch, 0)] == [4, 3, 2]
    assert [int(n) for _, n in reader.weighted(one, batch, None)] == [6, 4, 2]
    told = reader.weighted(SimpleNamespace(loss=one, num_targets=7), batch, 0)
    assert [int(n) for _, n in told] == [7]
    assert reader.weighted((one, 7), batch, 0) == ((one, 7),)


def test_a_module_of_ones_own_is_found_first_and_what_it_imports_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownlosses.py").write_text("import json\nimport ownpart\nfound = json\n")
    (tmp_path / "ownpart.py").touch()
    for name in ("json", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError\n")
    monkeypatch.setattr(reader, "OWN_FOLDERS", [str(tmp_path)])
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("ownlosses", "ownpart"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert reader.imported("ownlosses:found.dumps") is json.dumps
    assert sys.path[-1] == str(tmp_path)


def test_forward_gets_what_it_takes_and_a_model_of_a_directory_no_labels() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> None: ...

    class All(nn.Module):
        def forward(self, x: Tensor, **more: Tensor) -> None: ...

    batch = {name: torch.zeros(1) for name in ("x", "labels", "weight")}
    assert [*reader.taken_from(batch, Named(), is_hf=False)] == ["x", "labels"]
    assert [*reader.taken_from(batch, Named(), is_hf=True)] == ["x"]
    assert [*reader.taken_from(batch, All(), is_hf=False)] == ["x", "labels", "weight"]
    adapted = SimpleNamespace(get_base_model=Named, forward=lambda *_, **__: None)
    assert [*reader.taken_from(batch, adapted, is_hf=True)] == ["x"]


def test_a_template_without_an_end_is_left_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*args: object, **kwargs: object) -> str:
        while True:
            pass

    monkeypatch.setattr(templates, "SECONDS", 0.2)
    began = time.thread_time()
    assert prompting._after_answer(SimpleNamespace(apply_chat_template=render)) is None
    assert time.thread_time() - began < 5
