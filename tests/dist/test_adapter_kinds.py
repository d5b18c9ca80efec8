"""Runs with every kind of adapter: the same on any ranks, resumed, exported and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.engine.step import adapter_gradients
from colotrain.models import adapters
from tests.dist import hf
from tests.dist.test_export_check import Export, checked, export  # noqa: F401  a fixture
from tests.dist.test_tensor_parallel import verified
from tests.running import Colotrain, losses

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
TUNE = (
    *("data.target=tests.dist.hf:samples", "train.global_batch=8", "train.micro_batch=2"),
    *("train.eval_steps=0", "optim.lr=0.05", "checkpoint.content=trained"),
    "optim.schedule.name=constant",
)
DORA = (
    *("adapter.name=dora", "adapter.rank=2", "adapter.targets=all-linear"),
    *("adapter.ranks={'*mlp*':3}", "adapter.rslora=true"),
)
EXPERTS = ("adapter.name=lora", "adapter.rank=2", "adapter.targets=[q_proj]")
EXPERTS = (*EXPERTS, "adapter.parameters=[experts.gate_up_proj,experts.down_proj]")
PISSA = ("adapter.name=lora", "adapter.rank=2", "adapter.targets=all-linear", "adapter.init=pissa")
PISSA = (*PISSA, "adapter.ranks={'*mlp*':3}", "adapter.rslora=true")
CASES = {"dora": ("llama", DORA), "experts": ("mixtral", EXPERTS), "pissa": ("llama", PISSA)}
EMBEDDING = (*EXPERTS[:3], "adapter.parameters=[embed_tokens.weight]")
CASES["embedding"] = ("llama", EMBEDDING)
AXES = {"experts": "mesh.ep", "embedding": "mesh.tp"}
"""Case → the axis along which ranks are divided, until the run goes on in one process."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_resumed_exported_both_ways_and_read_again(
    case: str,
    colotrain: Colotrain,
    export: Export,  # noqa: F811
) -> None:
    kind, own = CASES[case]
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    model = f"model.hf={hf.make_chat_directory(colotrain.cwd / 'base', kind, **sizes)}"
    two = ("plugin=zero3", "cluster.procs_per_node=2")
    options = (*TUNE, model, *own)
    whole = colotrain.run(*options, *two, "train.max_steps=4", "name=whole")
    axes = [AXES[case]] if case in AXES else []
    two = (*two, *(f"{axis}=2" for axis in axes))
    colotrain.run(*options, *two, "train.max_steps=2", "name=run")
    one = ("plugin=zero1", "cluster.procs_per_node=1", *(f"{axis}=1" for axis in axes))
    one = (*one, "train.max_steps=4")
    assert losses(colotrain.resume("run", *one)) == pytest.approx(losses(whole), abs=1e-5)
    assert checked(export, "run", "--to", "adapter", "--adapter")["format"] == "peft"
    checked(export, "run", "--to", "merged")
    again = (own[0], "adapter.path=adapter")
    colotrain.run(*TUNE, model, *again, *two, "optim.lr=1e-12", "train.max_steps=1", "name=again")
    assert export("again", "--to", "merged-again").code == 0
    logits = [logits_of(colotrain.cwd / name) for name in ("merged", "merged-again")]
    assert (logits[0] - logits[1]).abs().max().item() < 1e-5
    assert (logits[0] - logits_of(colotrain.cwd / "base")).abs().max().item() > 1e-2
    base = transformers.AutoModelForCausalLM.from_pretrained(colotrain.cwd / "base")
    with_adapter = peft.PeftModel.from_pretrained(base, colotrain.cwd / "adapter").eval()
    assert (logits[0] - logits_of(with_adapter)).abs().max().item() < 1e-5


def logits_of(model: Any) -> Any:
    if isinstance(model, Path):
        model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        return model(input_ids=torch.stack([row["input_ids"] for row in hf.samples(4)])).logits


def test_modules_beside_adapters_go_out_and_in_again(
    colotrain: Colotrain,
    export: Export,  # noqa: F811
) -> None:
    model = f"model.hf={hf.make_chat_directory(colotrain.cwd / 'base')}"
    head = ("adapter.name=lora", "adapter.targets=[q_proj]", "freeze.except=[lm_head.*]")
    options = (*TUNE, model, "train.max_steps=2", "cluster.procs_per_node=1")
    colotrain.run(*options, *head, "name=run")
    assert export("run", "--to", "adapter", "--adapter").code == 0
    path = ("adapter.name=lora", "adapter.path=adapter", "optim.lr=1e-12")
    again = colotrain.run(*options, *path, "name=again", "observe.grads_every=1")
    assert again["status"] == "finished"
    assert export("again", "--to", "again-adapter", "--adapter").code == 0
    settings, tensors = read(colotrain.cwd / "again-adapter"), read(colotrain.cwd / "adapter")
    assert settings[0]["modules_to_save"] == ["lm_head"]
    for name, tensor in tensors[1].items():
        assert (settings[1][name] - tensor).abs().max().item() < 1e-6, name


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    settings = json.loads((folder / adapters.SETTINGS).read_text())
    return settings, load_file(folder / adapters.WEIGHTS)


DETACHED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = x + self.near(x) + self.far(x)FAR
        return x + self.experts[0](x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.spare = nn.ModuleList([Block(), Block()]), nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def data():
    return [{"x": torch.ones(4) * (i + 1)} for i in range(64)]
"""


@pytest.mark.parametrize(
    ("far", "targets", "message"),
    [
        (".detach()", "[near,far]", "far have no gradient: each leads to no loss"),
        ("", "all-linear", "the adapter of spare has no gradient: it is called by nothing"),
        ("", "[near,far,'*.experts.*']", ""),  # two of three experts have no token
    ],
)
def test_an_adapter_that_is_detached_or_never_called_is_an_error_by_name(
    far: str, targets: str, message: str, colotrain: Colotrain
) -> None:
    (colotrain.cwd / "apart.py").write_text(DETACHED.replace("FAR", far))
    result = colotrain(
        *("run", "model.target=apart:Model", "data.target=apart:data", "train.max_steps=1"),
        *("adapter.name=lora", f"adapter.targets={targets}", "train.global_batch=4", "name=run"),
        *("cluster.procs_per_node=2", "plugin=zero2", "train.eval_steps=0"),
    )
    assert (result.code != 0) == bool(message), result.err
    assert message in result.err + result.out


def test_a_layer_that_is_like_a_used_one_and_was_not_called_is_no_error() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    owners = {f"experts.{i}": [f"experts.{i}.lora_B.weight"] for i in range(2)}
    trained = {name for names in owners.values() for name in names}
    ask = {"trained": trained, "used": {"experts.0.lora_B.weight"}, "model": model}
    assert adapter_gradients.without_gradient(owners, {"experts.0"}, **ask) == []
    both = {"experts.0", "experts.1"}
    assert adapter_gradients.without_gradient(owners, both, **ask) == ["experts.1"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own", ["name=dora", "name=lora", "init=pissa"])
def test_every_plugin_trains_as_one_process(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("adapter.name=lora", f"adapter.{own}", "adapter.targets=all-linear")
    options = (*options, "adapter.rank=2")
    more = ("--world-sizes", "2", "--accumulation", "4", "--optimizer", "recipe", "--steps", "2")
    cases = verified(capsys, *more, "--freeze", "none", *options)
    assert {case["plugin"] for case in cases} >= {"zero1", "zero2", "zero3", "gemini"}
