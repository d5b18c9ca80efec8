"""Ranks that divide samples among themselves compute what one process computes."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from colotrain.cli.main import guarded
from colotrain.data.read.loader import planned_draw_seed
from colotrain.data.read.samples import StreamSamples
from colotrain.engine.gradients.accumulation import weighted_output
from colotrain.engine.sharding.context_parallel import make_shard
from colotrain.errors import ColotrainError
from colotrain.models import context_parallel
from colotrain.models.context_parallel import ATTRIBUTE, SequenceShard, divide_sequences_
from colotrain.runs.resolving import plan_from, resolve_config
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist import hf
from tests.dist.test_run import losses
from tests.dist.test_transport import run
from tests.representatives import half_of_the_day, of_each_day
from tests.running import SMALL, Colotrain

VERIFY = ("verify", *SMALL, "model.args.num_heads=4", "model.args.num_kv_heads=2")
OWN = ("freeze.patterns=[embed*,blocks.0.*]", "model.args.tie_embeddings=true", "data.isolate=true")
BRIEF = ("--steps", "2", "train.eval_steps=0")
"""Two steps have gradients and parameters before and after an update; no evaluation is compared."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Records so short that each sample has several."""
    file = tmp_path_factory.mktemp("documents") / "short.jsonl"
    texts = (f"{n} " * (n % 7 + 1) for n in range(2000))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"data.path={file}"


def verified(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    guarded([*VERIFY, *options, "--json"])
    cases: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["cases"]
    return cases


def test_every_plugin_equals_one_process_when_two_ranks_divide_each_sample(
    documents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = verified(capsys, "--world-sizes", "2", "--cp", "2", documents, *OWN)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert {case["accumulation_steps"] for case in cases} == {1, 4}
    for case in cases:
        assert case["passed"], case["difference"]
        assert case["cp"] == 2
        assert case["max_abs_gradient"] <= 1e-6


ON_FOUR_RANKS = {
    "plain": BRIEF,
    "isolated, recomputed, adamw": (
        *OWN,
        *("train.activation_checkpointing=full", "--optimizer", "recipe"),
    ),
    "bf16": (
        *("--accumulation", "4", "train.activation_checkpointing=selective"),
        *("train.precision=bf16", *BRIEF),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cp"), half_of_the_day(itertools.product(ON_FOUR_RANKS, (2, 4)))
)
def test_every_plugin_equals_one_process_on_four_ranks(
    options: str, cp: int, documents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ON_FOUR_RANKS[options]
    cases = verified(capsys, "--world-sizes", "4", "--cp", str(cp), documents, *more)
    assert {(case["plugin"], case["cp"]) for case in cases} == {(p, cp) for p in ROWS}
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        ("restarts_positions", "loss of step 1"),
        ("looks_across_documents", "loss of step 1"),
        ("keeps_gradients_of_keys", "gradient of"),
        ("divides_by_parts_of_samples", "loss of step 1"),
    ],
)
def test_a_fault_in_dividing_samples_is_found(
    mutant: str,
    says: str,
    documents: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    options = ("--world-sizes", "2", "--cp", "2", "--plugins", "zero3", "--accumulation", "1")
    (case,) = verified(capsys, *options, "--steps", "1", documents, *OWN)
    assert not case["passed"]
    assert says in case["difference"]


LENGTH = 24
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "head_dim": 8,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
OF_KIND: dict[str, dict[str, Any]] = {
    "gemma3_text": SLIDING,
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
    "cohere2": SLIDING,
    "exaone4": SLIDING,
    "glm4_moe": {
        **{"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minicpm3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8},
    },
    "ministral": SLIDING,
    "olmo3": SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "persimmon": {"hidden_dropout": 0.0},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0}


DIVIDED = (
    *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm", "glm4"),
    *("glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoe", "helium", "llama", "minicpm3"),
    *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3"),
    *("olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe"),
    *("smollm3", "stablelm", "starcoder2"),
)
"""Types whose samples ranks can divide: the rule's answer, proved by ranks of their own."""


@pytest.mark.parametrize("kind", of_each_day(DIVIDED, kept=["cohere2", "gemma3_text", "llama"]))
def test_a_transformers_model_divided_has_the_gradients_of_the_whole(kind: str) -> None:
    pytest.importorskip("transformers")
    run(compare_parts_with_whole, 2, kind)


def compare_parts_with_whole(rank: int, kind: str) -> None:
    from colotrain.models.huggingface_documents import can_keep_documents_apart

    for packed in ("document_ids", "position_ids", ""):
        model, forward = make_model(kind)
        if packed and not can_keep_documents_apart(model):
            continue
        ids, labels = torch.randint(0, 64, (2, 2, LENGTH)).unbind()
        labels[0, :15] = -100  # the first rank's first part has no target
        begins, index = torch.tensor([[7], [20]]), torch.arange(LENGTH)
        positions = index - begins * (index >= begins)
        document = positions if packed == "position_ids" else (index >= begins).long()
        batch = {"input_ids": ids, "labels": labels}
        batch |= {packed: document} if packed else {}
        loss, count = forward(**batch)
        loss.backward()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        divide_sequences_(model, make_shard(dist.group.WORLD, "cpu"))
        part, own_count = forward(**batch)
        part.backward()
        sums = torch.stack([part.detach(), own_count.double()])
        dist.all_reduce(sums)
        assert sums.tolist() == pytest.approx([loss.item(), count.item()], rel=1e-6)
        for name, parameter in model.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(found)
            assert (found - wanted.get(name, 0.0)).abs().max() <= 1e-6, name


def make_model(kind: str) -> tuple[Any, Any]:
    """A model of transformers in float64, and its forward as `model.hf` has it."""
    import transformers

    from colotrain.models.huggingface_attention import allow_division_
    from colotrain.models.huggingface_documents import can_keep_documents_apart
    from colotrain.models.huggingface_loss import isolating_loss, shifted_loss

    torch.manual_seed(5)
    words = {**BASE, **NO_DROPOUT, **OF_KIND.get(kind, {})}
    config = transformers.AutoConfig.for_model(kind, **words)
    config._experts_implementation = "eager"  # the fast one has no float64
    model: Any = transformers.AutoModelForCausalLM.from_config(config).double().train()
    allow_division_(model, config)
    config.is_causal, other = False, torch.nn.Module()
    allow_division_(other, config)
    assert not hasattr(other, ATTRIBUTE)
    config.is_causal = True
    loss = isolating_loss if can_keep_documents_apart(model) else shifted_loss
    return model, functools.partial(loss, model.forward)


def test_no_layer_keeps_keys_and_values_of_other_ranks() -> None:
    run(look_at_what_is_kept, 2)


def look_at_what_is_kept(rank: int) -> None:
    torch.manual_seed(1)
    wholes, gathered = [], context_parallel.gathered

    def watched(own: Tensor, shard: SequenceShard) -> Tensor:
        found = gathered(own, shard)
        wholes.append(StorageWeakRef(found.untyped_storage()))
        return found

    context_parallel.gathered = watched
    shard = make_shard(dist.group.WORLD, "cpu")
    shard.begin(16)
    parts = [torch.randn(1, heads, 16, 8).double() for heads in (4, 2, 2)]
    wanted = [part.clone().requires_grad_() for part in parts]
    whole = F.scaled_dot_product_attention(*wanted, is_causal=True, enable_gqa=True)
    whole.pow(2).sum().backward()
    rows = torch.cat([torch.arange(*chunk) for chunk in shard.chunks])
    own = [part[:, :, rows].clone().requires_grad_() for part in parts]
    mixed = context_parallel.attend(*own, shard, enable_gqa=True)
    assert [reference.expired() for reference in wholes] == [True]
    mixed.pow(2).sum().backward()
    assert [reference.expired() for reference in wholes] == [True, True]
    for found, expected in zip(own, wanted, strict=True):
        assert (found.grad - expected.grad[:, :, rows]).abs().max() <= 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_outputs_of_divided_samples_have_the_gradients_of_one_process(ranks: int) -> None:
    run(compare_whole_outputs, ranks, ranks)


def compare_whole_outputs(rank: int, ranks: int) -> None:
    torch.manual_seed(2)
    length, model = 6 * ranks, torch.nn.Module()
    shard = make_shard(dist.group.WORLD, "cpu")
    divide_sequences_(model, shard)
    shard.begin(length)
    x = torch.randn(3, length, 2, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.cat([torch.arange(*chunk) for chunk in shard.chunks])
    own = x.detach()[:, rows].clone().requires_grad_()

    def output(x: Tensor) -> dict[str, Any]:
        each = x.square().sum((2, 3)).flatten()
        counted = (x[..., 0, 0] > 0).sum()
        return {"hidden": (x.sin(),), "each": (each, counted), "sum": (each.sum(), 2), "none": None}

    def loss(found: dict[str, Any]) -> Tensor:
        (hidden,), (each, _), (total, _) = found["hidden"], found["each"], found["sum"]
        of_rows = each.view(3, length)
        weights = torch.arange(length)
        mixed = (of_rows.log_softmax(1) * weights).sum() + hidden.cumsum(1).square().sum()
        return mixed + total.square()

    wanted, found = output(x), context_parallel.whole_output(model, output(own))
    assert torch.equal(found["hidden"][0], wanted["hidden"][0])
    assert torch.equal(found["each"][0], wanted["each"][0])
    assert [found["each"][1], found["sum"][1]] == [wanted["each"][1], 2 * ranks]
    assert found["none"] is None
    loss(wanted).backward()
    loss(found).backward()
    assert torch.allclose(own.grad, x.grad[:, rows], rtol=1e-12, atol=0)
    with pytest.raises(ColotrainError, match="no 6 tokens"):
        context_parallel.whole_output(model, torch.zeros(3, 7))


def test_a_hugging_face_directory_trains_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = hf.make_directory("llama", tmp_path / "llama")
    plans = [
        plan_from(
            [
                *(f"model.hf={folder}", "data.target=tests.dist.hf:samples", "mesh.cp=2"),
                *("train.global_batch=8", "train.micro_batch=4", "train.max_steps=2"),
                *("train.eval_steps=0", "optim.name=sgd", "optim.lr=0.2", "checkpoint.every=0"),
                *("cluster.procs_per_node=2", f"plugin={plugin}", f"name={plugin}"),
            ]
        )
        for plugin in ("zero2", "gemini")
    ]
    for result in runner.verify(plans, tmp_path / "cases"):
        assert result.passed, result.difference


def test_a_run_goes_on_with_other_axes(colotrain: Colotrain) -> None:
    options = (*SMALL, "train.micro_batch=4", "observe.grads_every=1", "checkpoint.every=2")
    whole = colotrain.run(*options, "train.max_steps=4", "plugin=zero1", "name=whole")
    divided = colotrain.run(*options, "train.max_steps=4", "plugin=zero3", "mesh.cp=2", "name=cp")
    assert losses(divided) == pytest.approx(losses(whole), abs=1e-6)
    evaluations = [
        [event.fields["loss"] for event in colotrain.events(name) if event.kind == "eval"]
        for name in ("whole", "cp")
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], abs=1e-6)
    colotrain.run(
        *options, "train.max_steps=2", "plugin=zero1", "name=begun", "optim.schedule.name=constant"
    )
    more = ("train.max_steps=4", "mesh.cp=2", "plugin=gemini")
    resumed = colotrain("resume", "begun", *more, "--json")
    unbroken = colotrain.run(
        *options, "train.max_steps=4", "name=unbroken", "optim.schedule.name=constant"
    )
    assert losses(resumed.json) == pytest.approx(losses(unbroken), abs=1e-6)


def test_what_cannot_be_divided_is_refused(colotrain: Colotrain) -> None:
    odd = ("mesh.cp=3", "cluster.procs_per_node=4", "data.seq_len=32")
    lines = colotrain("plan", *SMALL, *odd).err.splitlines()
    keys = sorted(line.split(":")[1].strip().split("=")[0] for line in lines if "error" in line)
    assert keys == ["data.seq_len", "mesh.cp"]
    own = (
        "model.target=tests.dist.difficult:make",
        "model.args.name=Tied",
        "data.target=tests.dist.difficult:samples",
    )
    refused = colotrain(
        "plan", *own, "train.micro_batch=2", "cluster.procs_per_node=2", "mesh.cp=2"
    )
    assert refused.code == 2
    assert "mesh.cp=2: expected 1" in refused.err
    assert colotrain("verify", *SMALL, "--world-sizes", "3", "--cp", "2").code == 2
    wide = ("hardware=h100", "cluster.nodes=2", "mesh.cp=16", "data.seq_len=1024")
    refused = colotrain("plan", "recipe=llm-tiny", *wide)
    assert "mesh.cp=16: expected at most 8" in refused.err


def test_a_smoke_run_keeps_samples_that_can_be_divided() -> None:
    words = ("mesh.cp=3", "data.seq_len=384", "cluster.procs_per_node=3")
    assert resolve_config([*SMALL, *words], smoke=True, here=False).plan.data.seq_len == 126


def test_a_mean_loss_of_a_part_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    divide_sequences_(model, SequenceShard(rank=0, size=2))
    model.forward = lambda input_ids, labels: input_ids.float().mean()  # type: ignore[method-assign]
    with pytest.raises(ColotrainError, match="forward returned a mean loss"):
        weighted_output(model, {"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 4).long()})


def test_what_a_stream_draws_is_the_same_on_all_ranks_of_a_group() -> None:
    plan = plan_from([*SMALL, "data.target=tests.dist.hf:samples"])
    divided = plan_from([*SMALL, "data.target=tests.dist.hf:samples", "mesh.cp=2"])
    stream = StreamSamples.__new__(StreamSamples)
    assert planned_draw_seed(stream, plan) is None
    assert planned_draw_seed(stream, divided) == plan.train.seed
