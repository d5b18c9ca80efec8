"""Texts that a run writes are those of its model, and training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.models.llm import LLM
from tests.checkpoints import read_whole
from tests.dist.hf import make_directory
from tests.dist.test_preferences import OF_BYTES
from tests.running import SMALL, Colotrain, losses

PROMPTS = ("The ", "a")
ASKED = ("observe.samples.prompts=['The ',a]", "observe.samples.max_tokens=12")
STEPS = ("train.max_steps=4", "train.eval_every=2", "optim.lr=0.01")


def written(colotrain: Colotrain, name: str) -> list[dict[str, Any]]:
    lines = colotrain.rundir(name).samples_file.read_text().splitlines()
    return [json.loads(line) for line in lines]


def continued(model: Any, prompt: str, num: int, separator: int = 0) -> str:
    ids = list(prompt.encode())
    for _ in range(num):
        output = model(torch.tensor([ids]))
        token = int(getattr(output, "logits", output)[0, -1].argmax())
        if token == separator:
            break
        ids.append(token)
    return bytes(ids[len(prompt) :]).decode("utf-8", errors="replace")


def test_a_model_continues_the_prompts_and_trains_as_without(colotrain: Colotrain) -> None:
    words = (*SMALL, *STEPS, "plugin=zero3", "data.tokenizer=bytes", "train.seed=5")
    plain = colotrain.run(*words, "name=plain")
    asked = colotrain.run(*words, *ASKED, "observe.samples.every=2", "name=asked")
    assert losses(asked) == losses(plain)
    lines = written(colotrain, "asked")
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (0, 4) for prompt in PROMPTS
    ]
    state = read_whole(colotrain.rundir("asked").checkpoint(4))
    model = LLM(vocab_size=256, d_model=32, num_layers=3, num_heads=2, d_hidden=64)
    model.load_state_dict({n: state[f"model.{n}"] for n in model.state_dict()})
    with torch.no_grad():
        assert [line["text"] for line in lines[2:]] == [continued(model, p, 12) for p in PROMPTS]
    notes = [e.fields["text"] for e in colotrain.events("asked") if e.kind == "note"]
    assert any("step 4: 'The ' continues" in text for text in notes), notes


def test_stages_write_what_their_whole_model_does(colotrain: Colotrain) -> None:
    words = (*SMALL, *STEPS, *ASKED, "plugin=zero3", "data.tokenizer=bytes", "name=staged")
    chunks = ("mesh.pp=2", "mesh.pp_schedule=interleaved", "model.args.num_layers=4")
    colotrain.run(*words, *chunks, "train.eval_every=4", "optim.lr=0.05")
    lines = written(colotrain, "staged")
    state = read_whole(colotrain.rundir("staged").checkpoint(4))
    model = LLM(vocab_size=256, d_model=32, num_layers=4, num_heads=2, d_hidden=64)
    model.load_state_dict({n: state[f"model.{n}"] for n in model.state_dict()})
    with torch.no_grad():
        assert [line["text"] for line in lines[2:]] == [continued(model, p, 12) for p in PROMPTS]
    assert lines[0]["text"] != lines[2]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("plugin=zero1",),
        ("plugin=zero2", "accumulate.steps=2", "train.micro_batch=null"),
        ("plugin=fsdp-hybrid", "train.precision=bf16"),
        ("plugin=gemini", "plugin.budget.host=1MiB", "plugin.disk_path=disk"),
        ("plugin=zero3", "mesh.tp=2"),
        ("train.compile=true", "plugin=zero2"),
    ],
    ids=lambda words: words[0].rpartition(".")[2].removeprefix("plugin="),
)
def test_so_it_does_under_every_plugin(colotrain: Colotrain, words: tuple[str, ...]) -> None:
    always = (*SMALL, *STEPS, "data.tokenizer=bytes", *words)
    plain = colotrain.run(*always, "name=plain")
    asked = colotrain.run(*always, *ASKED, "name=asked")
    assert losses(asked) == losses(plain)
    assert len(written(colotrain, "asked")) == 3 * len(PROMPTS)


@pytest.mark.slow
def test_ranks_that_divide_tokens_write_the_same_texts(colotrain: Colotrain) -> None:
    words = (*SMALL, *STEPS, *ASKED, "data.tokenizer=bytes", "plugin=zero3", "optim.lr=0.1")
    divided = {"cp": ("mesh.cp=2",), "tp": ("mesh.tp=2", "mesh.sequence_parallel=true")}
    steps = losses(colotrain.run(*words, "name=whole"))
    whole = written(colotrain, "whole")
    assert len({line["text"] for line in whole}) > 1
    for name, more in divided.items():
        found = losses(colotrain.run(*words, *more, "train.micro_batch=4", f"name={name}"))
        assert found == pytest.approx(steps, abs=1e-5)
        assert written(colotrain, name) == whole


def test_a_hugging_face_model_writes_what_transformers_generates(
    colotrain: Colotrain, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_directory("llama", tmp_path / "llama", **OF_BYTES)
    words = (f"model.hf={folder}", "data.corpus=stdlib", "plugin=zero2")
    data = (
        "data.tokenizer=bytes",
        "data.seq_len=32",
        "train.global_batch=4",
        "train.micro_batch=1",
    )
    short = ("cluster.procs_per_node=2", "train.max_steps=1", "train.eval_steps=1", "name=hf")
    colotrain.run(*words, *data, *short, *ASKED)
    first = written(colotrain, "hf")[: len(PROMPTS)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert [line["text"] for line in first] == [continued(model, p, 12) for p in PROMPTS]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("observe.samples.max_tokens=0",), "observe.samples.max_tokens"),
        (("observe.samples.prompts=['']",), "texts of at least one character"),
        (("data.target=tests.dist.difficult:samples",), "expected [] with data.target"),
    ],
)
def test_what_cannot_be_is_refused(
    colotrain: Colotrain, words: tuple[str, ...], expected: str
) -> None:
    result = colotrain("plan", *SMALL, *ASKED, *words)
    assert result.code == 2
    assert expected in result.err


def test_files_of_tokens_have_no_text(colotrain: Colotrain) -> None:
    (colotrain.cwd / "tokens.bin").write_bytes(bytes(8192))
    words = ("data.corpus=null", "data.path=tokens.bin")
    result = colotrain("plan", *SMALL, *ASKED, *words)
    assert result.code == 2
    assert "none with files of tokens" in result.err
