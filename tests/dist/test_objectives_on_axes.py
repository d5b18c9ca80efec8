"""Objectives and losses of the user's own where ranks divide matrices, and not samples alone."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from colotrain.cli.main import guarded
from colotrain.engine.sharding.context_parallel import collectives_of
from colotrain.models.loss import Logits, by_token
from colotrain.models.objectives.distill import TEACHER, learning_from_teacher
from colotrain.models.tensor_parallel import TensorShard, vocabulary_cross_entropy
from colotrain.spec.objectives import DistillPlan
from colotrain.verify import runner
from tests.dist.hf import make_directory
from tests.dist.test_transport import run
from tests.embedders import make_embedder
from tests.representatives import half_of_the_day, of_each_day
from tests.running import Colotrain, losses

pytest.importorskip("transformers")
PAIR = ("prompt", "chosen", "rejected")
FIELDS: dict[str, tuple[str, ...]] = {
    "dpo": PAIR,
    "orpo": PAIR,
    "simpo": PAIR,
    "reward": PAIR,
    "kto": ("prompt", "completion", "label"),
    "classify": ("text", "label"),
    "classify_tokens": ("tokens", "labels"),
    "embed": ("query", "positive"),
}
OF_BYTES = {"vocab_size": 256, "max_position_embeddings": 64}
OWN = """
import torch.nn.functional as F

def loss(batch, outputs):
    labels = batch["labels"]
    each = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return each, (labels != -100).sum()

def metrics(batch, outputs):
    found = outputs.logits.argmax(-1) == batch["labels"]
    return {"right": (found.sum(), (batch["labels"] != -100).sum())}
"""


def write_records(path: Path, fields: tuple[str, ...]) -> None:
    draw = random.Random(5)

    def text() -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 16)))

    def value(field: str, words: int) -> Any:
        if field == "label":
            return draw.random() < 0.5
        if field == "labels":
            return draw.choices(("O", "B", "I"), k=words)
        return [text() for _ in range(words)] if field == "tokens" else text()

    lengths = [draw.randint(1, 4) for _ in range(64)]
    records = [{field: value(field, words) for field in fields} for words in lengths]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def settings_of(objective: str, folder: Path) -> list[str]:
    """A tiny model of two heads of keys, and random records."""
    if objective in ("embed", "classify_tokens"):
        made = make_embedder(folder / "model", "qwen3")  # for its tokenizer
        make_directory("llama", made, **OF_BYTES)
        found = [f"model.hf={made}", "train.embed.pooling=last"]
    else:
        found = [f"model.hf={make_directory('llama', folder / 'model', **OF_BYTES)}"]
        found += ["data.tokenizer=bytes", "+model.args.pad_token_id=0"]
    if objective in ("own", "metrics"):
        (folder / "own_on_axes.py").write_text(OWN)
        found += ["data.corpus=stdlib", "train.metrics=own_on_axes:metrics"]
        found += ["train.loss=own_on_axes:loss"] * (objective == "own")
    else:
        write_records(folder / "records.jsonl", FIELDS[objective])
        found += [f"train.objective={objective}", "data.path=records.jsonl"]
    return [*found, "data.seq_len=32", "train.global_batch=8", "train.micro_batch=2"]


@pytest.mark.parametrize("objective", of_each_day([*FIELDS, "own"], kept=["dpo", "own"]))
def test_verify_passes_where_two_ranks_divide_each_matrix(
    objective: str, colotrain: Colotrain
) -> None:
    settings = settings_of(objective, colotrain.cwd)
    options = ("--tp", "2", "--world-sizes", "2", "--plugins", "zero3", "--accumulation", "2")
    result = colotrain("verify", *settings, *options, "--freeze", "none", "--steps", "2", "--json")
    assert result.code == 0, result.out + result.err
    assert all(case["max_abs_gradient"] > 0.0 for case in result.json["cases"])


PAIR_OF_RANKS = ("--world-sizes", "2", "--plugins", "zero3", "--accumulation", "1,4")
FOUR = ("--world-sizes", "4", "--plugins", "zero2", "--accumulation", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        *((objective, PAIR_OF_RANKS) for objective in half_of_the_day([*FIELDS, "own"])),
        ("kto", (*FOUR, "--tp", "2")),
        ("metrics", PAIR_OF_RANKS),
        ("simpo", FOUR),
    ],
)
def test_verify_passes_where_two_ranks_divide_each_sample(
    objective: str, options: tuple[str, ...], colotrain: Colotrain
) -> None:
    settings = settings_of(objective, colotrain.cwd)
    words = (*options, "--cp", "2", "--freeze", "none", "--steps", "2", "--json")
    result = colotrain("verify", *settings, *words)
    assert result.code == 0, result.out + result.err
    assert {case["cp"] for case in result.json["cases"]} == {2}
    assert all(case["max_abs_gradient"] > 0.0 for case in result.json["cases"])


def test_a_loss_that_every_rank_counts_is_found(
    colotrain: Colotrain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.counts_whole_samples_on_every_rank")
    monkeypatch.chdir(colotrain.cwd)
    settings = settings_of("simpo", colotrain.cwd)
    options = ("--cp", "2", "--world-sizes", "2", "--plugins", "zero3", "--accumulation", "1")
    assert guarded(["verify", *settings, *options, "--freeze", "none", "--steps", "2"]) == 4
    assert "gradient of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kto", "embed", "dpo"])
def test_verify_passes_where_two_pairs_of_ranks_divide_samples(
    objective: str, colotrain: Colotrain
) -> None:
    settings = settings_of(objective, colotrain.cwd)
    options = ("--tp", "2", "--world-sizes", "4", "--plugins", "zero2", "--accumulation", "2")
    result = colotrain("verify", *settings, *options, "--freeze", "none", "--steps", "2", "--json")
    assert result.code == 0, result.out + result.err


def test_a_model_without_a_known_plan_takes_the_users(colotrain: Colotrain) -> None:
    made = make_embedder(colotrain.cwd / "model", "bert")
    config = json.loads((made / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (made / "config.json").write_text(json.dumps(config))
    write_records(colotrain.cwd / "records.jsonl", FIELDS["classify"])
    data = ("data.path=records.jsonl", "data.seq_len=32", "train.objective=classify")
    layer = "bert.encoder.layer.*"
    styles = f"{layer}.intermediate.dense: colwise, {layer}.output.dense: rowwise"
    options = ("mesh.tp=2", "cluster.procs_per_node=2", "train.global_batch=4")
    words = (f"model.hf={made}", *data, *options)
    assert "cannot divide its matrices" in colotrain("plan", *words).err
    plan = colotrain("plan", *words, f"mesh.tp_plan={{{styles}}}", "--json")
    assert plan.code == 0, plan.err


@pytest.mark.slow
def test_four_ranks_compute_what_the_reference_says_of_each_sample_once(
    colotrain: Colotrain,
) -> None:
    """Two groups of two ranks: each sample has one row, and a run on one rank reads the same."""
    settings = settings_of("dpo", colotrain.cwd)
    settings += ["train.max_steps=3", "train.eval_steps=0", "optim.name=sgd", "optim.lr=0.1"]
    wide = ("cluster.procs_per_node=4", "mesh.tp=2", "mesh.sequence_parallel=true")
    kinds = {"wide": wide, "alone": ("cluster.procs_per_node=1",)}
    steps = {
        name: losses(colotrain.run(*settings, "plugin=zero2", f"name={name}", *more))
        for name, more in kinds.items()
    }
    assert steps["wide"] == pytest.approx(steps["alone"], abs=1e-6)
    assert steps["wide"][0] != steps["wide"][2]
    found: dict[str, dict[int, Tensor]] = {}
    for name in kinds:
        rows: list[tuple[int, Tensor]] = []
        for path in colotrain.rundir(name).precomputed.glob("*/train-*.safetensors"):
            with safe_open(path, "pt") as file:
                ids, values = file.get_tensor("ids").tolist(), file.get_tensor("rows")
                rows += list(zip(ids, values, strict=True))
        found[name] = dict(rows)
        assert len(rows) == len(found[name]) == 24
    assert found["wide"].keys() == found["alone"].keys()
    for index, row in found["wide"].items():
        assert torch.allclose(row, found["alone"][index], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_losses_of_each_token_by_parts_of_the_vocabulary_have_the_gradients_of_the_whole(
    cap: float | None,
) -> None:
    run(compare_tokens, 2, cap)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_distillation_by_parts_of_the_vocabulary_has_the_gradients_of_the_whole(
    cap: float | None,
) -> None:
    run(compare_distillation, 2, cap)


def compare_distillation(rank: int, cap: float | None) -> None:
    """With the loss written out: KL of the teacher's top tokens and of all others together."""
    torch.manual_seed(12)
    plan = DistillPlan(teacher="", top_k=3, alpha=0.7, temperature=1.5)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 8, (3, 7))
    labels[0, :3] = -100
    teacher = torch.randn(21, 8).mul(2).log_softmax(1)
    top = teacher.topk(3)
    rest = teacher.exp().scatter(1, top.indices, 0.0).sum(1, keepdim=True).log()
    bits = torch.cat([top.values, rest], 1).float().view(torch.int32)
    batch = {TEACHER: torch.cat([top.indices.int(), bits], 1).view(3, 7, 7)}

    logits = F.linear(x, head).flatten(0, 1) * 0.7
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    soft = (logits / 1.5).log_softmax(1)
    others = soft.exp().scatter(1, top.indices, 0.0).sum(1, keepdim=True).log()
    student = torch.cat([soft.gather(1, top.indices), others], 1)
    known = bits.view(torch.float32).double()
    divergence = (known.exp() * (known - student)).sum(1)[labels.flatten() != -100].sum()
    hard = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    wanted = 0.7 * 1.5**2 * divergence + 0.3 * hard
    wanted.backward()

    shard = TensorShard(rank=rank, size=2)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    own = [part.detach().clone().requires_grad_() for part in (x, head.chunk(2)[rank])]
    with learning_from_teacher(torch.nn.Module(), batch, plan=plan):
        kind = Logits(scale=0.7, cap=cap)
        found = vocabulary_cross_entropy(own[0], own[1], labels, shard, logits=kind)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=0)
    found.backward()
    for part, gradient in zip(own, (x.grad, head.grad.chunk(2)[rank]), strict=True):
        # the sum of the teacher's probabilities, which are of float32, is taken for 1
        assert torch.allclose(part.grad, gradient, rtol=0, atol=1e-6)


def compare_tokens(rank: int, cap: float | None) -> None:
    torch.manual_seed(11)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(0, 8, (3, 7)), torch.randn(21, dtype=torch.float64)
    labels[0, :3] = -100
    logits = F.linear(x, head, bias) * 0.7
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (each * weights).sum().backward()
    wanted = x.grad, head.grad.chunk(2)[rank], bias.grad.chunk(2)[rank]
    shard = TensorShard(rank=rank, size=2)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    parts = (x, head.chunk(2)[rank], bias.chunk(2)[rank])
    own = [part.detach().clone().requires_grad_() for part in parts]
    with by_token():
        found = vocabulary_cross_entropy(
            own[0], own[1], labels, shard, bias=own[2], logits=Logits(scale=0.7, cap=cap)
        )
    assert torch.allclose(found, each, rtol=0, atol=1e-12)
    assert (found[:3] == 0).all()
    (found * weights).sum().backward()
    for part, gradient in zip(own, wanted, strict=True):
        assert torch.allclose(part.grad, gradient, rtol=0, atol=1e-12)
