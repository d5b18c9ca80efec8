"""`colotrain export`: what other programs load is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colotrain.cli.main import guarded
from colotrain.data.prepare.tokens import decode, prepare
from colotrain.data.read.loader import open_samples
from colotrain.models.loading import build_whole
from colotrain.rundir import RunDir
from tests.checkpoints import read_whole
from tests.dist import hf
from tests.dist.conftest import SMALL, Colotrain, Result

transformers = pytest.importorskip("transformers")
STEPS = 4
TEXT = "Übermut tut selten gut.\n\tdef f(x): return x ** 2  # naïve 日本\n"


@pytest.fixture
def export(
    colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """`colotrain export` in this process, in the folder of the runs."""
    monkeypatch.chdir(colotrain.cwd)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = guarded(["export", *arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def trained(rundir: RunDir) -> tuple[Any, dict[str, torch.Tensor]]:
    """The run's model with the newest checkpoint's values, and those values."""
    plan = rundir.plan()
    model = build_whole(plan.model, seed=plan.train.seed).eval()
    stored = read_whole(rundir.checkpoint(plan.train.max_steps))
    held = {n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(held[name])
    return model, held


@pytest.mark.parametrize(
    ("tokenizer", "vocab", "more"),
    [
        ("bytes", 256, ("model.args.num_kv_heads=1",)),
        ("bpe-300", 300, ("model.args.tie_embeddings=true", "model.args.rope_theta=500.0")),
    ],
)
def test_an_llm_becomes_a_llama_that_transformers_loads(
    colotrain: Colotrain,
    export: Callable[..., Result],
    tokenizer: str,
    vocab: int,
    more: tuple[str, ...],
) -> None:
    (colotrain.cwd / "corpus.txt").write_text(TEXT * 200)
    colotrain.run(
        *SMALL,
        *("data.corpus=null", "data.path=corpus.txt", f"data.tokenizer={tokenizer}"),
        *(f"model.args.vocab_size={vocab}", "plugin=zero3", "name=llm", f"train.max_steps={STEPS}"),
        *("model.args.norm_eps=1e-3", *more),
    )
    check = ("--check",) if tokenizer == "bytes" else ()
    done = export("llm", "--to", "llama", "--shard-size", "20KB", "--json", *check)
    assert done.code == 0, done.err
    assert not check or done.json["receipt"]["passed"]
    assert done.json["format"] == "hf"
    assert done.json["step"] == STEPS
    assert done.json["notes"] == []
    folder = colotrain.cwd / "llama"
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {folder / name for name in index["weight_map"].values()} == set(weights)

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info.values()), info
    own, _ = trained(colotrain.rundir("llm"))
    plan = colotrain.rundir("llm").plan()
    ids = open_samples(plan.data, "train")[0]["input_ids"][None]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - own(ids)).abs().max().item() < 1e-5

    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    prepared = prepare(plan.data)
    text = decode(prepared, ids[0].tolist())
    assert loaded.decode(ids[0]) == text
    for sample in (text, TEXT, "".join(map(chr, range(0x250)))):
        numbers = loaded(sample, add_special_tokens=False)["input_ids"]
        assert decode(prepared, numbers) == sample
    if tokenizer == "bytes":
        assert loaded(TEXT, add_special_tokens=False)["input_ids"] == list(TEXT.encode())


def test_a_model_of_ones_own_becomes_safetensors_under_its_names(
    colotrain: Colotrain, export: Callable[..., Result]
) -> None:
    (colotrain.cwd / "own.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.Linear(4, 3)\n"
        "        self.b = torch.nn.Linear(3, 1)\n"
        "        self.register_buffer('seen', torch.tensor([7]))\n"
        "    def forward(self, x): return self.b(self.a(x)).square().mean()\n"
        "def data(): return [{'x': torch.ones(4) * i} for i in range(64)]\n"
    )
    own = ("model.target=own:Model", "data.target=own:data", "train.global_batch=4", "name=own")
    colotrain.run(*own, "plugin=zero2", "train.max_steps=2", "cluster.procs_per_node=2")
    refused = export("own", "--to", "x", "--format", "hf")
    assert refused.code == 2
    assert "no architecture of transformers" in refused.err.splitlines()[-1]
    done = export("own", "--to", "out", "--dtype", "bf16", "--json")
    assert done.code == 0, done.err
    assert done.json["format"] == "safetensors"
    found = load_file(colotrain.cwd / "out" / "model.safetensors")
    stored = read_whole(colotrain.rundir("own").checkpoint(2))
    wanted = {n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")}
    assert found.keys() == wanted.keys() == {"a.weight", "a.bias", "b.weight", "b.bias", "seen"}
    for name, tensor in wanted.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found[name], expected)


def test_an_adapter_goes_out_and_in_again(
    colotrain: Colotrain, export: Callable[..., Result]
) -> None:
    folder = hf.make_directory("gpt2", colotrain.cwd / "gpt2")
    options = (
        *("data.target=tests.dist.hf:samples", "train.global_batch=8", "train.micro_batch=2"),
        *(f"model.hf={folder}", "cluster.procs_per_node=2", "train.max_steps=3", "optim.lr=0.05"),
    )
    lora = (
        "adapter.name=lora",
        "adapter.rank=3",
        "adapter.alpha=5",
        "adapter.targets=[c_*,lm_head]",
    )
    colotrain.run(*options, *lora, "plugin=gemini", "name=first", "checkpoint.content=trained")
    out = export("first", "--to", "adapter", "--adapter", "--json")
    assert out.code == 0, out.err
    settings = json.loads((colotrain.cwd / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (3, 5.0, True)
    again = ("adapter.name=lora", "adapter.path=adapter", "optim.lr=1e-9", "plugin=zero3")
    colotrain.run(*options, *again, "name=second")
    for run in ("first", "second"):
        assert export(run, "--to", f"{run}-merged").code == 0
    logits = [_logits(colotrain.cwd / name) for name in ("first-merged", "second-merged", "gpt2")]
    assert (logits[0] - logits[1]).abs().max().item() < 1e-5
    assert (logits[0] - logits[2]).abs().max().item() > 1e-2
    # the head is tied to the embedding, which has no adapter and must stay as it is
    merged = load_file(colotrain.cwd / "first-merged" / "model.safetensors")
    base = load_file(colotrain.cwd / "gpt2" / "model.safetensors")
    embedding = "transformer.wte.weight"
    assert torch.equal(merged[embedding], base[embedding])
    adapter = load_file(colotrain.cwd / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.lm_head.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(merged["lm_head.weight"], base[embedding] + b @ a * 5 / 3)
    config = json.loads((colotrain.cwd / "first-merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("first", ["embed", "head"])
def test_an_adapter_of_a_tied_head_is_merged_into_the_head_alone(
    first: str, colotrain: Colotrain, export: Callable[..., Result]
) -> None:
    layers = {"embed": "torch.nn.Embedding(9, 4)", "head": "torch.nn.Linear(4, 9, bias=False)"}
    made = "".join(
        f"        self.{name} = {layers[name]}\n"
        for name in sorted(layers, key=lambda name: name != first)
    )
    module = f"tied_by_{first}"  # this process keeps what it has imported
    (colotrain.cwd / f"{module}.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"{made}"
        "        self.head.weight = self.embed.weight\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.cross_entropy(self.head(self.embed(x)), x)\n"
        "def data(): return [{'x': torch.tensor(i % 9)} for i in range(64)]\n"
    )
    own = (f"model.target={module}:Model", f"data.target={module}:data", "name=tied")
    lora = ("adapter.name=lora", "adapter.rank=2", "adapter.alpha=3", "adapter.targets=[head]")
    options = ("plugin=zero3", "train.max_steps=3", "train.global_batch=4", "optim.lr=0.1")
    colotrain.run(*own, *lora, *options, "cluster.procs_per_node=2")
    done = export("tied", "--to", "out", "--json")
    assert done.code == 0, done.err
    assert "no longer tied" in done.json["notes"][0]
    found = load_file(colotrain.cwd / "out" / "model.safetensors")
    stored = read_whole(colotrain.rundir("tied").checkpoint(3))
    shared, a, b = (stored[f"model.{n}.weight"] for n in (first, "head.lora_A", "head.lora_B"))
    assert found.keys() == {"embed.weight", "head.weight"}
    assert torch.equal(found["embed.weight"], shared)
    assert (b @ a).abs().max().item() > 1e-2
    torch.testing.assert_close(found["head.weight"], shared + b @ a * 3 / 2)


def test_peft_computes_the_same_with_an_exported_adapter(
    colotrain: Colotrain, export: Callable[..., Result]
) -> None:
    peft = pytest.importorskip("peft")
    for kind, targets in (("llama", "[q_proj,down_proj]"), ("gpt2", "[c_attn]")):
        folder = hf.make_directory(kind, colotrain.cwd / kind)
        colotrain.run(
            *("data.target=tests.dist.hf:samples", "train.global_batch=8", "train.micro_batch=2"),
            *(f"model.hf={folder}", "cluster.procs_per_node=2", "train.max_steps=3"),
            *("adapter.name=lora", f"adapter.targets={targets}", f"name={kind}-1", "optim.lr=0.05"),
        )
        assert export(f"{kind}-1", "--to", f"{kind}-adapter", "--adapter").code == 0
        assert export(f"{kind}-1", "--to", f"{kind}-merged").code == 0
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = peft.PeftModel.from_pretrained(base, colotrain.cwd / f"{kind}-adapter")
        with torch.no_grad():
            found = model.eval()(input_ids=_inputs()).logits
        expected = _logits(colotrain.cwd / f"{kind}-merged")
        assert (found - expected).abs().max().item() < 1e-5


def _inputs() -> torch.Tensor:
    return torch.stack([sample["input_ids"] for sample in hf.samples(4)])


def _logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=_inputs()).logits


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    colotrain: Colotrain, export: Callable[..., Result]
) -> None:
    colotrain.run(*SMALL, "name=llm", "train.max_steps=2", "checkpoint.every=1")
    full = colotrain.cwd / "full"
    full.mkdir()
    (full / "mine").touch()
    weights = next(colotrain.rundir("llm").checkpoint(2).glob("__*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    for arguments, words in [
        (("--to", "full"), "is not empty; give a new directory"),
        (("--to", "x"), "the checkpoint is damaged"),
        (("--to", "x", "--step", "7"), "no checkpoint of step 7; there are: 2, 1"),
        (("--to", "x", "--adapter", "--step", "1"), "--adapter: the run has no adapter"),
        (("--to", "x", "--dtype", "int8"), "--dtype int8: expected one of float32"),
        (("--to", "x", "--format", "gguf"), "--format gguf: expected one of auto"),
        (("--to", "x", "--shard-size", "big"), "--shard-size big: expected"),
        ((), "export: expected --to DIR"),
    ]:
        refused = export("llm", *arguments)
        assert refused.code == 2, arguments
        assert words in refused.err.splitlines()[-1]
    assert sorted(path.name for path in colotrain.cwd.iterdir()) == ["full", "runs"]
    assert [path.name for path in full.iterdir()] == ["mine"]
    assert export("llm", "--to", "x", "--step", "1").code == 0
