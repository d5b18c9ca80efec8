"""Ranks that divide matrices among themselves compute what one process computes."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colotrain.cli.main import guarded
from colotrain.engine.sharding.context_parallel import collectives_of
from colotrain.errors import ColotrainError
from colotrain.models.huggingface_loss import chunk_loss_
from colotrain.models.huggingface_tensors import divisions_of
from colotrain.models.llm import LLM
from colotrain.models.tensor_parallel import (
    TensorShard,
    divide_parameters_,
    part_of,
    vocabulary_logits,
)
from colotrain.models.tensor_parallel_styles import (
    SUMMED,
    apply_styles_,
    partial_parameters,
    problems_of,
)
from colotrain.spec.divisions import VOCABULARY, Divisions
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist import hf, plain
from tests.dist.test_context_parallel import LENGTH, make_model
from tests.dist.test_transport import run
from tests.families import GROUPED, Family
from tests.representatives import of_each_day
from tests.running import SMALL, Colotrain

HEADS = ("model.args.num_heads=4", "model.args.num_kv_heads=2")
DIVIDED = (
    *("arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe"),
    *("helium", "llama", "minicpm3", "ministral", "ministral3", "mistral", "mixtral", "nemotron"),
    *("olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen3"),
    *("qwen3_moe", "smollm3", "starcoder2"),
)
"""Types whose matrices ranks can divide: the rule's answer, proved by ranks of their own."""
WHOLE_VOCABULARY = ("gemma", "gemma2", "gemma3_text", "minicpm3")
"""Types whose tied embedding or logits are not divided, and neither are tokens then."""
BY_TOKENS_TOO = [kind for kind in DIVIDED if kind != "bloom"]  # a norm follows its embedding
IN_FLOAT32 = ("gemma3_text", "cohere", "cohere2", "glm4_moe", "helium")
"""Types whose norms or routers multiply their weights in float32."""
SIXTEEN = ("cluster.procs_per_node=16", "mesh.tp=16")
RECOMPUTED = "train.activation_checkpointing=full"
BY_TOKENS = "mesh.sequence_parallel=true"
OWN = ("freeze.patterns=[embed*,blocks.0.*]", "train.grad_clip=0.1")


def verified(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    guarded(["verify", *SMALL, *HEADS, *options, "--json"])
    cases: list[dict[str, Any]] = loads(capsys.readouterr().out)["cases"]
    return cases


def test_every_plugin_equals_one_process_when_two_ranks_divide_each_matrix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = verified(capsys, "--world-sizes", "2", "--tp", "2", *OWN)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert {case["accumulation_steps"] for case in cases} == {1, 4}
    for case in cases:
        assert case["passed"], case["difference"]
        assert case["tp"] == 2
        assert case["max_abs_gradient"] <= 1e-6


def test_a_run_that_divides_tokens_between_parts_equals_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--plugins", "zero2", "--accumulation", "4", "--steps", "1")
    (case,) = verified(capsys, "--world-sizes", "2", "--tp", "2", BY_TOKENS, *options, *OWN)
    assert case["passed"], case["difference"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "2,4", *OWN),
        ("--tp", "2,4", *OWN, BY_TOKENS),
        (
            *("--tp", "2", "--cp", "2", "data.isolate=true", BY_TOKENS, "--optimizer", "recipe"),
            "train.activation_checkpointing=full",
        ),
        (
            *("--tp", "2", "--cp", "2", "model.args.num_kv_heads=1", "data.isolate=true"),
            *("model.args.tie_embeddings=true", "train.activation_checkpointing=full"),
            *("freeze.patterns=[blocks.0.*]", "--optimizer", "recipe"),
        ),
        (
            *("--tp", "2", "--accumulation", "4", "train.activation_checkpointing=selective"),
            "train.precision=bf16",
        ),
    ],
    ids=[
        "more ranks than heads of keys",
        "by tokens",
        "by tokens, with cp, recomputed, adamw",
        "tied, with cp, recomputed, adamw",
        "bf16",
    ],
)
def test_every_plugin_equals_one_process_on_four_ranks(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = verified(capsys, "--world-sizes", "4", *options)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_divide_samples_and_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    """One case of each kind of mesh; scripts/verify_axes.py has 720."""
    axes = ("--world-sizes", "8", "--cp", "2", "--tp", "2,4", "--plugins", "zero2,fsdp-hybrid")
    options = ("--accumulation", "4", "--steps", "2", "plugin.name=fsdp-hybrid")
    cases = verified(capsys, *axes, *options, "plugin.shard_size=2", *OWN)
    assert [(case["plugin"], case["tp"]) for case in cases] == [
        *(("zero2", 2), ("fsdp-hybrid", 2)),
        *(("zero2", 4), ("fsdp-hybrid", 4)),
    ]
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.parametrize(
    ("mutant", "tp", "says"),
    [
        ("keeps_gradients_of_inputs", 2, "gradient of"),
        ("counts_norms_twice", 2, "parameter"),
        ("divides_by_ranks_of_a_matrix", 2, "gradient of"),
        ("splits_keys_wrongly", 2, "loss of step 1"),
        ("takes_another_head", 4, "loss of step 1"),
        ("lets_norms_drift", 2, "norm.weight in step 1: differs by nan"),
        ("leaves_norms_partial", 2, "norm.weight in step 1: differs by nan"),
    ],
)
def test_a_fault_in_dividing_matrices_is_found(
    mutant: str,
    tp: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    ranks = ("--world-sizes", str(tp), "--tp", str(tp))
    options = ("--plugins", "zero3", "--accumulation", "1", "--steps", "1", *OWN)
    if mutant == "leaves_norms_partial":
        options += (BY_TOKENS,)
    if mutant == "counts_norms_twice":  # the norm is 1 % too large, which small updates hide
        steep = ("optim.name=sgd", "optim.betas=[0.0]", "optim.lr=100", "optim.weight_decay=0")
        options += ("--optimizer", "recipe", *steep, "optim.schedule.warmup_steps=0")
    (case,) = verified(capsys, *ranks, *options)
    assert not case["passed"]
    assert says in case["difference"]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_matrices_have_the_gradients_of_whole_ones_in_float64(
    kv_heads: int, tied: bool
) -> None:
    run(compare_parts_with_whole, 4, kv_heads, tied, False)


def test_ranks_that_divide_tokens_between_parts_have_the_same_gradients_in_float64() -> None:
    run(compare_parts_with_whole, 4, 2, False, True)


def compare_parts_with_whole(rank: int, kv_heads: int, tied: bool, by_tokens: bool) -> None:
    torch.manual_seed(7)
    model = LLM(
        vocab_size=52,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=kv_heads,
        d_hidden=24,
        tie_embeddings=tied,
    ).double()
    ids, labels = torch.randint(0, 52, (2, 3, 12)).unbind()
    labels[0, :7] = -100
    with torch.no_grad():
        wanted_logits = model(ids)
    loss, count = model(ids, labels)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    group = dist.group.WORLD
    shard = TensorShard(rank=rank, size=4, by_tokens=by_tokens)
    shard.all_gather, shard.reduce_scatter = collectives_of(group, "cpu")
    splits = divide_parameters_(model, model.divisions(), shard)
    partial = partial_parameters(model, model.divisions(), shard, splits)
    assert len(partial) == 5 * by_tokens  # the norms
    assert ("head.weight" in splits) != tied
    with torch.no_grad():
        assert (model(ids) - wanted_logits).abs().max() <= 1e-12
    found, found_count = model(ids, labels)
    found.backward()
    assert found_count == count
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        whole = wanted[name]
        part = part_of(whole, splits[name]) if name in splits else whole
        found = shard.sum(parameter.grad) if name in partial else parameter.grad
        assert (found - part).abs().max() <= 1e-12, name


def test_logits_of_parts_of_the_vocabulary_have_a_gradient() -> None:
    run(compare_logits, 2)


def compare_logits(rank: int) -> None:
    torch.manual_seed(3)
    head, x = nn.Linear(6, 8, bias=False).double(), torch.randn(5, 6).double().requires_grad_()
    (head(x) ** 2).sum().backward()
    wanted, x.grad = x.grad, None
    shard = TensorShard(rank=rank, size=2)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    own = head.weight.detach().chunk(2)[rank].clone().requires_grad_()
    (vocabulary_logits(x, own, shard) ** 2).sum().backward()
    assert torch.allclose(x.grad, wanted, rtol=0, atol=1e-12)
    assert torch.allclose(own.grad, head.weight.grad.chunk(2)[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", of_each_day(DIVIDED, kept=["gpt_oss", "minicpm3", "olmo2"]))
def test_a_transformers_model_divided_by_its_plan_has_the_gradients_of_the_whole(kind: str) -> None:
    pytest.importorskip("transformers")
    run(compare_plan_with_whole, 2, kind, False)


@pytest.mark.parametrize("kind", of_each_day(BY_TOKENS_TOO, kept=["phi"]))
def test_a_transformers_model_divided_by_tokens_has_the_gradients_of_the_whole(kind: str) -> None:
    pytest.importorskip("transformers")
    run(compare_plan_with_whole, 2, kind, True)


def compare_plan_with_whole(rank: int, kind: str, by_tokens: bool) -> None:
    model, forward = make_model(kind)
    chunk_loss_(model)
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin with zeros, which hide their number
            parameter.add_(torch.randn_like(parameter) / 10)
    ids, labels = torch.randint(0, 64, (2, 2, LENGTH)).unbind()
    loss, _ = forward(input_ids=ids, labels=labels)
    loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    shard = TensorShard(rank=rank, size=2, by_tokens=by_tokens)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    divisions = divisions_of(model, model.config)
    assert divisions.allows(2), divisions
    grouped = "num_key_value_heads" in divisions.sizes
    assert divisions.allows(4) == (not grouped or divisions.sizes["num_key_value_heads"] == 4)
    if by_tokens and not divisions.divides_tokens:
        assert kind in WHOLE_VOCABULARY
        return
    splits = divide_parameters_(model, divisions, shard)
    apply_styles_(model, divisions, shard)
    partial = partial_parameters(model, divisions, shard, splits)
    assert len(splits) >= 2 * model.config.num_hidden_layers
    found, _ = forward(input_ids=ids, labels=labels)
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-9)
    for name, parameter in model.named_parameters():
        whole = wanted[name]
        if whole is None:
            assert parameter.grad is None
            continue
        part = part_of(whole, splits[name]) if name in splits else whole
        limit = 1e-6 if kind in IN_FLOAT32 else 1e-9
        grad = shard.sum(parameter.grad) if name in partial else parameter.grad
        assert (grad - part).abs().max() <= limit * max(1.0, whole.abs().max()), name


def test_a_plan_with_an_unknown_style_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 1))
    model.add_module("2", nn.Embedding(4, 4))
    model.add_module("3", nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model.add_module("4", nn.Sequential(nn.LayerNorm(4)))
    plan = {"0": "sideways", "1": "colwise", "3": "rowwise", "nothing.*": "rowwise", "4": SUMMED}
    said = [str(problem) for problem in problems_of(plan, model)]
    wanted = (
        "=sideways: expected one of",
        "1 is a Conv1d",
        "with 2)",
        "matches a",
        "4.0 is inside",
    )
    assert len(said) == len(wanted)
    assert all(words in line for line, words in zip(said, wanted, strict=True))
    twice = problems_of({"4.0": SUMMED, "4.*": SUMMED}, model)  # it would be summed twice
    assert ["matches 4.0, too" in str(problem) for problem in twice] == [True, True]


def test_a_matrix_that_cannot_be_divided_evenly_is_an_error_but_a_vocabulary_stays_whole() -> None:
    styles = {"head": VOCABULARY}
    how = Divisions(dims={"head.weight": 0, "up.weight": 0}, styles=styles)
    assert how.split("head.weight", (7, 4), rank=0, ranks=2) is None
    with pytest.raises(ColotrainError, match=r"up\.weight has a size of 7"):
        how.split("up.weight", (7, 4), rank=0, ranks=2)


def test_a_plan_of_the_users_own_divides_any_model(
    colotrain: Colotrain, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("model.target=tests.dist.own_heads:make", "data.target=tests.dist.own_heads:samples")
    plan = "mesh.tp_plan={'blocks.*.query':colwise,'blocks.*.out':rowwise,'blocks.*.norm':"
    plan += f"{SUMMED},'blocks.*.up':colwise_gather_output,'blocks.*.down':rowwise_split_input}}"
    options = ("--world-sizes", "4", "--tp", "2", "--plugins", "zero1,zero3", "--steps", "2")
    by_tokens = ("mesh.tp=2", "cluster.procs_per_node=2", BY_TOKENS, "train.micro_batch=2")
    refused = colotrain("plan", *own, plan, *by_tokens)
    assert "mesh.sequence_parallel=true: expected false" in refused.err.lower()
    guarded(["verify", *own, plan, "train.micro_batch=2", *options, "--json"])
    cases = loads(capsys.readouterr().out)["cases"]
    assert {(case["plugin"], case["accumulation_steps"], case["tp"]) for case in cases} == {
        (plugin, steps, 2) for plugin in ("zero1", "zero3") for steps in (1, 4)
    }
    assert not [case["difference"] for case in cases if not case["passed"]]
    wrong = plan.replace("query", "querry").replace("rowwise_split_input", "sideways")
    for odd, says in ((wrong, ["tp_plan.blocks.*.querry", "sideways"]), (plan, ["query=24"])):
        refused = colotrain("plan", *own, odd, "train.micro_batch=2", *SIXTEEN)
        assert refused.code == 2
        errors = [line for line in refused.err.splitlines() if "error" in line]
        assert len(errors) == len(says)
        assert all(word in line for word, line in zip(says, errors, strict=True))


BIASED = Family("Qwen3", "Qwen3ForCausalLM", "qwen3", {**GROUPED, "attention_bias": True})
MANY_HEADS = {**GROUPED, "num_key_value_heads": 4, "tie_word_embeddings": True}


def test_a_hugging_face_directory_trains_and_exports_as_plain_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = BIASED.make(tmp_path / "made")
    options = ("mesh.tp=2", "train.grad_clip=0.1")
    plans = [plain.plan_of(BIASED, folder, plugin, *options) for plugin in ("zero1", "gemini")]
    for result in plain.compare(BIASED, folder, tmp_path / "cases", plans):
        assert result.passed, result.difference
        assert result.tp == 2
    for difference in plain.export_differences(BIASED, folder, tmp_path / "cases", plans):
        assert difference <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tied_hugging_face_directory_trains_with_every_product_of_axes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    family = Family("Llama, tied", "LlamaForCausalLM", "llama", MANY_HEADS)
    folder = family.make(tmp_path / "made")
    ranks = "cluster.procs_per_node=4"
    plans = [
        plain.plan_of(family, folder, plugin, ranks, f"mesh.tp={tp}", f"mesh.cp={cp}", *options)
        for plugin in ("zero1", "zero3", "gemini")
        for tp, cp in ((2, 1), (2, 2), (4, 1))
        for options in ((), (BY_TOKENS, "train.micro_batch=1", RECOMPUTED))
    ]
    for plan, result in zip(
        plans, plain.compare(family, folder, tmp_path / "cases", plans), strict=True
    ):
        assert result.passed, (plan.plugin.name, plan.mesh, result.difference)


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        ("forgets_norms", "norm.weight in step 1: differs by nan"),
        ("adds_bias_everywhere", "loss of step 2"),
        pytest.param("counts_norms_twice", "parameter", marks=pytest.mark.slow),
        pytest.param("splits_keys_wrongly", "loss of step 1", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_dividing_a_hugging_face_model_is_found(
    mutant: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    folder = BIASED.make(tmp_path / "made")
    plan = plain.plan_of(BIASED, folder, "zero3", "mesh.tp=2", "train.grad_clip=0.1")
    (result,) = plain.compare(BIASED, folder, tmp_path / "cases", [plan])
    assert not result.passed
    assert says in str(result.difference)


def test_hugging_face_models_without_a_plan_are_refused(
    tmp_path: Path, colotrain: Colotrain
) -> None:
    pytest.importorskip("transformers")
    folder = hf.make_directory("gpt2", tmp_path / "gpt2")
    data = ("data.target=tests.dist.hf:samples", "train.micro_batch=4", "cluster.procs_per_node=2")
    refused = colotrain("plan", f"model.hf={folder}", *data, "mesh.tp=2")
    assert refused.code == 2
    assert "transformers has no plan for gpt2" in refused.err


def test_what_cannot_be_divided_is_refused(colotrain: Colotrain) -> None:
    odd = ("mesh.tp=3", "cluster.procs_per_node=3", "optim.name=adamw8bit")
    lines = colotrain("plan", *SMALL, *HEADS, *odd, "train.global_batch=null").err.splitlines()
    keys = sorted(line.split(":")[1].strip().split("=")[0] for line in lines if "error" in line)
    assert keys == ["mesh.tp", "mesh.tp"]
    assert "one of 1, 2, 4" in "".join(lines)
    uneven = ("mesh.tp=2", "cluster.procs_per_node=2", BY_TOKENS, "data.seq_len=33")
    assert "a multiple of 2 with mesh.tp=2, mesh.seq" in colotrain("plan", *SMALL, *uneven).err
    own = ("model.target=tests.dist.difficult:make", "model.args.name=Tied")
    data = ("data.target=tests.dist.difficult:samples", "train.micro_batch=2")
    refused = colotrain("plan", *own, *data, "cluster.procs_per_node=2", "mesh.tp=2")
    assert refused.code == 2
    assert "mesh.tp=2: expected 1" in refused.err
    wide = ("hardware=h100", "cluster.nodes=2", "mesh.tp=16", "cluster.procs_per_node=8")
    assert "mesh.tp=16: expected a divisor" in colotrain("plan", "recipe=llm-tiny", *wide).err
