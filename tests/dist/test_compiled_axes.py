"""Blocks that are compiled beside `mesh.tp`, `mesh.cp` and `mesh.ep` compute what one process does.

What ranks exchange is outside the compiled graphs, which all layers share and no step makes anew.
"""

from __future__ import annotations

import functools
from json import loads
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from colotrain.cli.main import guarded
from colotrain.engine.model.blocks import checkpoint_blocks_, compile_blocks_
from colotrain.engine.sharding.context_parallel import collectives_of, make_shard
from colotrain.models.context_parallel import divide_sequences_
from colotrain.models.loading import build_whole
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_, part_of
from colotrain.models.tensor_parallel_styles import (
    apply_styles_,
    own_divisions,
    partial_parameters,
)
from colotrain.spec.plan import ModelPlan, Recompute
from tests.dist.test_transport import run
from tests.running import SMALL, Colotrain

LAYERS = 10
"""More than the compiler makes graphs for of one function (`recompile_limit`)."""
VOCAB, SEQ = 96, 12
MIXTURE = (
    *("model.target=tests.dist.own_experts:make", "data.target=tests.dist.own_experts:samples"),
    *("mesh.ep_plan=['blocks.*.experts']", "train.global_batch=8", "train.micro_batch=2"),
)


def make_directory(kind: str, folder: Path) -> Path:
    import transformers

    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    torch.manual_seed(torch.initial_seed() % 1000 + 3)
    config = classes[kind](
        **{"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "head_dim": 6},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 32, "initializer_range": 0.1},
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axis", "recompute"),
    [
        ("qwen3", "tp", "none"),
        ("llama", "tokens", "full"),
        ("llama", "cp", "none"),
        ("qwen3", "cp", "full"),
    ],
)
def test_layers_of_transformers_are_compiled_once_and_equal_one_process(
    kind: str, axis: str, recompute: Recompute, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    run(compare_with_transformers, 2, make_directory(kind, tmp_path), axis, recompute)


def compare_with_transformers(rank: int, folder: Path, axis: str, recompute: Recompute) -> None:
    """Losses and gradients of two steps in float64, against plain transformers."""
    import transformers

    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    plan = ModelPlan(target=None, hf=str(folder))
    model = build_whole(plan, seed=0).double()
    model.load_state_dict(whole.state_dict())
    splits, summed = {}, {name for name, _ in model.named_parameters()}
    if axis == "cp":
        divide_sequences_(model, make_shard(dist.group.WORLD, "cpu"))
    else:
        how = own_divisions(model, plan)
        shard = TensorShard(rank=rank, size=2, by_tokens=axis == "tokens")
        splits = divide_parameters_(model, how, shard)
        apply_styles_(model, how, shard)
        summed = set(partial_parameters(model, how, shard, splits))
        shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    compile_blocks_(model)
    checkpoint_blocks_(model, recompute)
    frames, compiled = torch._dynamo.utils.counters["frames"], 0
    torch.manual_seed(5)
    for step in range(3):
        ids, labels = torch.randint(VOCAB, (2, 2, SEQ))
        logits = whole(input_ids=ids).logits
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss_sum, _ = model(input_ids=ids, labels=labels)
        found = loss_sum / labels.numel()
        total = found.detach().clone()
        if axis == "cp":
            dist.all_reduce(total)
        assert abs(float(total) - float(wanted.detach())) < 1e-10, step
        for each, loss in ((whole, wanted), (model, found)):
            each.zero_grad()
            loss.backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if name in summed:
                dist.all_reduce(gradient)
            reference = whole.get_parameter(name).grad
            if name in splits:
                reference = part_of(reference, splits[name])
            assert torch.allclose(gradient, reference, rtol=0, atol=1e-10), (step, name)
        compiled = compiled or frames["ok"]
        assert frames["ok"] == frames["total"] == compiled > 0, "a graph was made anew"
    assert compiled < 2 * LAYERS, "each layer has its own graphs"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("zero3", (*SMALL, "--tp", "2")),
        ("gemini", (*SMALL, "--cp", "2", "train.activation_checkpointing=full")),
        ("zero2", (*MIXTURE, "--ep", "2")),
    ],
    ids=["tp", "cp, recomputed", "ep"],
)
def test_compiled_blocks_of_two_ranks_equal_one_process(
    plugin: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--world-sizes", "2", "--plugins", plugin, "--accumulation", "4", "--steps", "2")
    guarded(["verify", *words, *options, "--freeze", "none", "train.compile=true", "--json"])
    (case,) = loads(capsys.readouterr().out)["cases"]
    assert case["passed"], case["difference"]


def test_pieces_of_blocks_keep_no_chosen_outputs(colotrain: Colotrain) -> None:
    way = ("train.activation_checkpointing=selective", "train.compile=true")
    for axis in ("mesh.tp=2", "mesh.cp=2"):
        refused = colotrain("plan", *SMALL, axis, *way)
        assert refused.code == 2
        said = " ".join(refused.err.split())
        assert f"none or full with train.compile and {axis[:7]} (blocks are compiled" in said
