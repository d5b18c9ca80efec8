"""`export --check`: exit 0 for what was trained, 4 for an export that is planted wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from colotrain.cli.main import guarded
from colotrain.export import check
from tests.dist import hf
from tests.dist.conftest import SMALL, Colotrain, Result
from tests.representatives import half_of_the_day

transformers = pytest.importorskip("transformers")
SMALL_RUN = (
    *("train.global_batch=8", "train.micro_batch=2", "train.max_steps=3", "optim.lr=0.05"),
    *("train.eval_steps=2", "data.seq_len=48", "cluster.procs_per_node=1"),
)
LINEAR = "adapter.targets=[q_proj]"
LORA = ("adapter.name=lora", "adapter.rank=2", "adapter.alpha=4")
QUESTIONS = [f"What is {n} + {n}?" for n in range(60)]
Export = Callable[..., Result]


@pytest.fixture
def export(
    colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Export:
    """`colotrain export` in this process, in the folder of the runs."""
    monkeypatch.chdir(colotrain.cwd)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = guarded(["export", *arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def write_chats(folder: Path) -> None:
    rows = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": str(2 * n)}]
        for n, q in enumerate(QUESTIONS)
    ]
    lines = [json.dumps({"messages": row}) for row in rows]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")


CHATS = ("data.path=chats.jsonl", "data.chat_template=chatml", "data.validation_fraction=0.3")


def checked(export: Export, *arguments: str) -> dict[str, Any]:
    """The receipt of an export that passes its check."""
    done = export(*arguments, "--check", "--json")
    assert done.code == 0, done.out + done.err
    receipt = done.json["receipt"]
    assert receipt["passed"]
    assert receipt["problems"] == []
    return receipt


@pytest.mark.slow
def test_a_chat_run_is_exported_with_its_template_and_checked(
    colotrain: Colotrain, export: Export
) -> None:
    folder = hf.make_chat_directory(colotrain.cwd / "base")
    (folder / "preprocessor_config.json").write_text('{"size": 8}')
    write_chats(colotrain.cwd)
    colotrain.run(*SMALL_RUN, *CHATS, f"model.hf={folder}", "name=chat")
    receipt = checked(export, "chat", "--to", "out")
    loss = receipt["validation_loss"]
    assert loss["difference"] < 1e-5
    assert loss["targets"] > 0
    assert receipt["outputs"]["largest_difference"] < 1e-4
    out = colotrain.cwd / "out"
    assert (out / "preprocessor_config.json").read_text() == '{"size": 8}'
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    asked = [{"role": "user", "content": "What is 2 + 2?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>"), 256]
    again = export("out", "--check")  # by the directory alone, as a later reader does
    assert again.code == 0, again.err
    weights = out / "model.safetensors"
    before = weights.read_bytes()
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][0] *= 1.1
    save_file(tensors, weights, {"format": "pt"})
    for arguments in (("out",), ("chat", "--to", "out")):
        wrong = export(*arguments, "--check", "--json")
        assert wrong.code == 4, wrong.out
        problems = " ".join(wrong.json["receipt"]["problems"])
        assert "model.safetensors is not the file that was exported" in problems
        assert "logits differ" in problems
        (out / "receipt.json").write_text(json.dumps(receipt))
    weights.write_bytes(before)
    template = (out / "chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text(template.replace("<|im_end|>", "<|im_end|> "))
    (out / "receipt.json").unlink()
    wrong = export("chat", "--to", "out", "--check")
    assert wrong.code == 4
    assert "the chat template is not the one that the run trained with" in wrong.out
    (out / "chat_template.jinja").write_text(template)
    assert export("chat", "--to", "out", "--check").code == 0
    moved = shutil.move(colotrain.rundir("chat").path, colotrain.cwd / "gone")
    assert moved
    assert export("out", "--check").code == 0
    save_file(tensors, weights, {"format": "pt"})
    wrong = export("out", "--check")
    assert wrong.code == 4
    assert "the logits after a few tokens differ" in wrong.out


@pytest.mark.slow
def test_an_adapter_carries_all_that_trained(colotrain: Colotrain, export: Export) -> None:
    pytest.importorskip("peft")
    folder = hf.make_chat_directory(colotrain.cwd / "base", dtype=torch.bfloat16)
    write_chats(colotrain.cwd)
    head = ("freeze.except=[lm_head.*,model.norm.*]", "adapter.targets=[q_proj,down_proj]")
    more = (f"model.hf={folder}", *LORA, *head, "checkpoint.content=trained", "name=lora")
    colotrain.run(*SMALL_RUN, *CHATS, *more)
    checked(export, "lora", "--to", "adapter", "--adapter")
    settings = json.loads((colotrain.cwd / "adapter/adapter_config.json").read_text())
    assert sorted(settings["modules_to_save"]) == ["lm_head", "model.norm"]
    assert (colotrain.cwd / "adapter/chat_template.jinja").is_file()
    merged = export("lora", "--to", "merged", "--check")
    assert merged.code == 0, merged.out
    assert "trained in float32, written in bfloat16" in merged.out
    wrong = colotrain.cwd / "wrong"
    shutil.copytree(colotrain.cwd / "adapter", wrong)
    (wrong / "receipt.json").unlink()
    tensors = load_file(wrong / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, wrong / "adapter_model.safetensors")
    assert export("lora", "--to", "wrong", "--check").code == 4


def test_an_adapter_beside_which_its_own_layer_trained_is_refused(
    colotrain: Colotrain, export: Export
) -> None:
    folder = hf.make_chat_directory(colotrain.cwd / "base")
    write_chats(colotrain.cwd)
    both = ("freeze.except=[lm_head.*]", "adapter.targets=[q_proj,lm_head]")
    colotrain.run(*SMALL_RUN, *CHATS, f"model.hf={folder}", *LORA, *both, "name=lora")
    refused = export("lora", "--to", "adapter", "--adapter")
    assert refused.code == 2
    assert "lm_head.weight trained beside the adapters" in refused.err


KINDS = ["tied", "resized", "resized-tied", "mixtral", "dpo", "isolated", "gpt2", "lora-tied"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", half_of_the_day(KINDS))
def test_other_runs_of_text_are_checked(kind: str, colotrain: Colotrain, export: Export) -> None:
    more: dict[str, Any] = {"tie_word_embeddings": kind.endswith("tied")}
    if kind == "mixtral":
        more |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        more |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    if kind == "gpt2":
        more |= {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}
    architecture = kind if kind in ("mixtral", "gpt2") else "llama"
    folder = hf.make_chat_directory(colotrain.cwd / "base", architecture, **more)
    write_chats(colotrain.cwd)
    options = [*SMALL_RUN, *CHATS, f"model.hf={folder}", "name=run"]
    if kind == "dpo":
        rows = [{"prompt": q, "chosen": "yes", "rejected": "no no"} for q in QUESTIONS]
        lines = "\n".join(json.dumps(row) for row in rows)
        (colotrain.cwd / "chats.jsonl").write_text(lines + "\n")
        options += ["train.objective=dpo", *LORA, "adapter.targets=[q_proj]"]
    if kind == "isolated":
        options += ["data.packing=stream", "data.isolate=true"]
    if kind == "lora-tied":
        options += [*LORA, "adapter.targets=[q_proj]"]
    if kind.startswith("resized"):
        options += ["model.tokens=['<|im_start|>','<|im_end|>']"]
    colotrain.run(*options)
    receipt = checked(export, "run", "--to", "out")
    if kind.startswith("resized"):
        tokenizer = transformers.AutoTokenizer.from_pretrained("out")
        ids = tokenizer("<|im_start|><|im_end|>", add_special_tokens=False)["input_ids"]
        model = transformers.AutoModelForCausalLM.from_pretrained("out")
        assert len(ids) == 2
        assert max(ids) < model.get_input_embeddings().num_embeddings == model.config.vocab_size
    assert receipt["validation_loss"]["difference"] < 1e-4
    weights = colotrain.cwd / "out" / "model.safetensors"
    tensors = load_file(weights)
    name = next(n for n in tensors if n.endswith(("o_proj.weight", "attn.c_proj.weight")))
    tensors[name] = -tensors[name]
    save_file(tensors, weights, {"format": "pt"})
    (colotrain.cwd / "out" / "receipt.json").unlink()
    assert export("run", "--to", "out", "--check").code == 4


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True])
def test_a_run_in_half_precision_is_checked_in_float32(
    adapts: bool, colotrain: Colotrain, export: Export
) -> None:
    folder = hf.make_chat_directory(colotrain.cwd / "base", dtype=torch.bfloat16)
    write_chats(colotrain.cwd)
    half = (f"model.hf={folder}", "model.args.dtype=bfloat16", "name=half")
    colotrain.run(*SMALL_RUN, *CHATS, *half, *([*LORA, LINEAR] if adapts else []))
    for number, options in enumerate([(), ("--dtype", "fp32"), ("--adapter",)][: 2 + adapts]):
        receipt = checked(export, "half", "--to", f"out{number}", *options)
        assert receipt["outputs"]["largest_difference"] < 1e-5
    weights = colotrain.cwd / "out0" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1.02
    save_file(tensors, weights, {"format": "pt"})
    (colotrain.cwd / "out0" / "receipt.json").unlink()
    assert export("half", "--to", "out0", "--check").code == 4


@pytest.mark.slow
@pytest.mark.parametrize("trains", ["[]", "[model.embed_tokens.weight]"])
def test_adapters_beside_new_rows_are_merged_or_refused(
    colotrain: Colotrain, export: Export, trains: str
) -> None:
    sizes = {"vocab_size": 257, "tie_word_embeddings": True}  # no row to spare
    folder = hf.make_chat_directory(colotrain.cwd / "base", "llama", **sizes)
    write_chats(colotrain.cwd)
    tokens = "model.tokens=['<|im_start|>','<|im_end|>']"
    more = (*LORA, "adapter.targets=[q_proj]", f"freeze.except={trains}", tokens)
    colotrain.run(*SMALL_RUN, *CHATS, f"model.hf={folder}", *more, "name=run")
    refused = export("run", "--to", "adapter", "--adapter")
    assert refused.code == 2
    assert "has rows of added tokens" in refused.err
    assert not (colotrain.cwd / "adapter").exists()
    checked(export, "run", "--to", "merged")


def classified(count: int = 64) -> list[dict[str, Any]]:
    """For `data.target`: tokens and a class."""
    draws = torch.Generator().manual_seed(4)
    rows = torch.randint(3, 288, (count, 12), generator=draws)
    return [{"input_ids": row, "labels": row[0] % 3} for row in rows]


@pytest.mark.slow
def test_a_head_on_a_directory_without_one_becomes_a_directory(
    colotrain: Colotrain, export: Export
) -> None:
    folder = hf.make_chat_directory(colotrain.cwd / "backbone")
    (colotrain.cwd / "heads.py").write_text(
        "from transformers import AutoModelForSequenceClassification as Auto\n"
        "def classifier(folder):\n"
        "    return Auto.from_pretrained(folder, num_labels=3, pad_token_id=0)\n"
    )
    target = ("model.target=heads:classifier", f"+model.args.folder={folder}")
    data = ("data.target=tests.dist.test_export_check:classified", "name=head")
    colotrain.run(*SMALL_RUN, *target, *data)
    receipt = checked(export, "head", "--to", "out")
    assert receipt["format"] == "hf"
    found = transformers.AutoModelForSequenceClassification.from_pretrained("out")
    assert type(found).__name__ == "LlamaForSequenceClassification"
    assert transformers.AutoTokenizer.from_pretrained("out").eos_token == "<|endoftext|>"
    again = ("model.hf=out", "data.target=tests.dist.test_export_check:classified", "name=again")
    colotrain.run(*SMALL_RUN, *again)
    checked(export, "again", "--to", "again-out")
    weights = colotrain.cwd / "out" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["score.weight"]
    save_file(tensors, weights, {"format": "pt"})
    wrong = export("head", "--to", "out", "--check")
    assert wrong.code == 4
    assert "missing keys in the weights: score.weight" in wrong.out


def test_the_adapter_of_a_classifier_made_of_a_causal_directory_is_checked_as_one(
    colotrain: Colotrain, export: Export
) -> None:
    pytest.importorskip("peft")
    folder = hf.make_chat_directory(colotrain.cwd / "backbone")
    made = ("architectures: [LlamaForSequenceClassification]", "num_labels: 3", "pad_token_id: 0")
    words = (f"model.hf={folder}", f"model.args={{{', '.join(made)}}}", "name=sequence")
    data = "data.target=tests.dist.test_export_check:classified"
    colotrain.run(
        *SMALL_RUN,
        *words,
        data,
        *LORA,
        "adapter.targets=[q_proj,down_proj]",
        "freeze.except=[score.*]",
    )
    assert checked(export, "sequence", "--to", "adapter", "--adapter")["format"] == "peft"
    weights = colotrain.cwd / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    (name,) = [name for name in tensors if "score" in name]
    save_file({**tensors, name: tensors[name] + 1.0}, weights, {"format": "pt"})
    (colotrain.cwd / "adapter" / "receipt.json").unlink()
    wrong = export("sequence", "--to", "adapter", "--check")
    assert wrong.code == 4
    assert "logits differ" in wrong.out


@pytest.mark.slow
def test_models_of_ones_own_are_checked_in_their_own_class(
    colotrain: Colotrain, export: Export
) -> None:
    (colotrain.cwd / "corpus.txt").write_text("to be or not to be\n" * 400)
    data = ("data.corpus=null", "data.path=corpus.txt", "data.tokenizer=bytes")
    size = ("model.args.vocab_size=256", "train.max_steps=3", "train.eval_steps=2", "name=llm")
    colotrain.run(*SMALL, *data, *size)
    assert checked(export, "llm", "--to", "llama")["format"] == "hf"
    assert checked(export, "llm", "--to", "own", "--format", "safetensors")["format"] == "own"
    (colotrain.cwd / "sums.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)\n"
        "        self.b.weight = torch.nn.Parameter(self.a.weight.T.clone())\n"
        "    def forward(self, x): return (self.b(self.a(x)) - x).square().mean()\n"
        "def data(): return [{'x': torch.arange(4.0) * i / 9} for i in range(64)]\n"
    )
    own = ("model.target=sums:Model", "data.target=sums:data", "name=own", "train.eval_steps=2")
    colotrain.run(*own, "train.max_steps=2", "train.global_batch=4", "train.micro_batch=2")
    receipt = checked(export, "own", "--to", "own-out")
    loss = receipt["validation_loss"]
    assert loss["difference"] < 1e-6 * loss["export"]
    weights = colotrain.cwd / "own-out" / "model.safetensors"
    tensors = load_file(weights)
    tensors["a.bias"] += 0.1
    save_file(tensors, weights)
    assert export("own", "--to", "own-out", "--check").code == 4
    other = {"model": {"target": "os:system", "args": {"command": "touch touched"}}}
    (colotrain.cwd / "own-out" / "colotrain.json").write_text(json.dumps(other))
    assert "does not name the model of the run" in export("own-out", "--check").out
    assert not (colotrain.cwd / "touched").exists()
    weights.write_text("{")
    assert export("own", "--to", "own-out", "--check").code == 2
    assert "model.safetensors is not the file" in export("own-out", "--check").out


def make_adapter(colotrain: Colotrain, export: Export) -> Path:
    """An adapter's export that was checked, from the run `lora`."""
    pytest.importorskip("peft")
    folder = hf.make_chat_directory(colotrain.cwd / "base")
    write_chats(colotrain.cwd)
    colotrain.run(*SMALL_RUN, *CHATS, f"model.hf={folder}", *LORA, LINEAR, "name=lora")
    checked(export, "lora", "--to", "adapter", "--adapter")
    return colotrain.cwd / "adapter"


def test_without_its_run_the_base_of_an_adapter_is_loaded_only_on_trust(
    colotrain: Colotrain, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(colotrain, export)
    shutil.move(colotrain.rundir("lora").path, colotrain.cwd / "gone")
    alone = export("adapter", "--check")
    assert alone.code == 0, alone.out
    assert "there is no run" in alone.out
    assert "is not loaded" in alone.out
    assert "differ by" not in alone.out
    assert "validation loss" not in alone.out
    trusted = export("adapter", "--check", "--trust-code")
    assert trusted.code == 0, trusted.out
    assert "logits after a few tokens of 2 samples differ by at most" in trusted.out
    with monkeypatch.context() as patch:
        patch.setattr(check, "LEAST_S", 0.0)
        slow = export("adapter", "--check", "--trust-code")
    assert slow.code == 1
    assert f"{colotrain.cwd / 'base'} did not end in" in slow.err
    (colotrain.cwd / "base" / "config.json").unlink()
    os.mkfifo(colotrain.cwd / "base" / "config.json")
    assert export("adapter", "--check").code == 0
    refused = export("adapter", "--check", "--trust-code")
    assert refused.code == 2
    assert "config.json: expected regular files" in refused.err


def test_an_adapter_with_another_base_than_the_runs_is_not_what_was_trained(
    colotrain: Colotrain, export: Export
) -> None:
    settings = make_adapter(colotrain, export) / "adapter_config.json"
    about = json.loads(settings.read_text())
    settings.write_text(json.dumps(about | {"base_model_name_or_path": "/elsewhere"}))
    (colotrain.cwd / "accelerate.py").write_text("raise AssertionError\n")  # is not imported
    wrong = export("lora", "--to", "adapter", "--check")
    assert wrong.code == 4
    assert "adapter_config.json does not name the base of the run" in wrong.out
    assert "logits of" in wrong.out  # with the base of the run


def test_a_run_that_cannot_be_used_from_here_is_left_out_of_a_check_by_the_receipt(
    colotrain: Colotrain, export: Export
) -> None:
    (colotrain.cwd / "ownmodel.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 4)\n"
        "    def forward(self, x): return (super().forward(x) - x).square().mean()\n"
        "def data(): return [{'x': torch.arange(4.0) * i / 9} for i in range(64)]\n"
    )
    own = ("model.target=ownmodel:Model", "data.target=ownmodel:data", "name=own")
    colotrain.run(*own, "train.max_steps=2", "train.global_batch=4", "train.micro_batch=2")
    checked(export, "own", "--to", "out")
    elsewhere = Colotrain(colotrain.cwd / "elsewhere")
    elsewhere.cwd.mkdir()
    alone = elsewhere("export", "../out", "--check", "--json")
    assert alone.code == 0, alone.err
    receipt = alone.json["receipt"]
    assert "ownmodel" in receipt["notes"][0]
    assert receipt["outputs"]["largest_difference"] is None
    assert receipt["validation_loss"] == {"run": None, "export": None}
    shown = elsewhere("export", "../out", "--check").out
    assert shown.count("note: checked without its run") == 1
    assert "differ by" not in shown
    (colotrain.cwd / "out" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in elsewhere("export", "../out", "--check").out
    os.mkfifo(colotrain.cwd / "out" / "model.safetensors")
    refused = elsewhere("export", "../out", "--check")
    assert refused.code == 2
    assert "model.safetensors: expected regular files" in refused.err


def test_what_cannot_be_checked_is_refused(colotrain: Colotrain, export: Export) -> None:
    folder = hf.make_directory("llama", colotrain.cwd / "base")
    options = ("data.target=tests.dist.hf:samples", f"model.hf={folder}", "name=run")
    colotrain.run(*SMALL_RUN, *options)
    (colotrain.cwd / "empty").mkdir()
    (colotrain.cwd / "empty" / "file").touch()
    for arguments, words in [
        (("run", "--to", "empty", "--check"), "is no export of colotrain"),
        (("empty", "--check"), "has no receipt.json"),
        (("run", "--to", "tensors", "--format", "safetensors", "--check"), "tensors alone"),
    ]:
        refused = export(*arguments)
        assert refused.code == 2, refused.out + refused.err
        assert words in refused.err.splitlines()[-1]
