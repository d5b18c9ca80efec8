"""Adapters of layers that ranks divide (`mesh.tp`) train as those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.sharding.context_parallel import collectives_of
from colotrain.export.job import Choice
from colotrain.export.write import export
from colotrain.models import adapters
from colotrain.models.llm import LLM
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_, part_of
from colotrain.models.tensor_parallel_styles import (
    SUMMED,
    apply_styles_,
    own_divisions,
    partial_parameters,
    problems_of,
)
from colotrain.spec.plan import AdapterPlan, ModelPlan
from colotrain.verify import runner
from colotrain.verify.compare import Tolerance
from tests.dist import hf, own_heads
from tests.dist.test_hf import LORA, adapters_at_first, logits_of, logits_of_checkpoint, plan_of
from tests.dist.test_run import losses
from tests.dist.test_tensor_parallel import HEADS, verified
from tests.dist.test_transport import run
from tests.running import SMALL, Colotrain

ALL = "adapter.targets=[*attention*,*mlp*]"
EMBEDDING = "freeze.patterns=[embed*]"
"""Makes one case of `verify`, not three; adapters freeze it anyway."""
STYLES = {
    "blocks.*.q*": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.norm": SUMMED,
    "blocks.*.up": "colwise_gather_output",
    "blocks.*.down": "rowwise_split_input",
}
"""A plan for `own_heads` with every style; its first glob matches names inside adapters, too."""


def test_divided_adapters_have_the_gradients_of_whole_ones_in_float64() -> None:
    run(compare_parts_with_whole, 2)


def compare_parts_with_whole(rank: int) -> None:
    for by_tokens in (False, True):
        ids, labels = torch.randint(0, 52, (2, 3, 12)).unbind()
        sizes = {"vocab_size": 52, "d_model": 32, "num_layers": 2, "num_heads": 4}
        model = LLM(**sizes, num_kv_heads=2, d_hidden=24)
        batch = {"input_ids": ids, "labels": labels}
        for name in ("lora", "dora"):
            compare(
                copy.deepcopy(model), ("*attention*", "*mlp*"), {}, rank, by_tokens, batch, name
            )
    rows = own_heads.samples(3)
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}
    batch["x"] = batch["x"].double()
    for name in ("lora", "dora"):
        compare(own_heads.make(), ("blocks*", "head"), STYLES, rank, False, batch, name)


def compare(
    model: nn.Module,
    targets: tuple[str, ...],
    styles: dict[str, str],
    rank: int,
    by_tokens: bool,
    batch: dict[str, Tensor],
    name: Any,
) -> None:
    """Compare with the whole model: the loss with dropped inputs, and all adapters' gradients."""
    adapters.attach_(model, AdapterPlan(name=name, rank=3, alpha=6.0, targets=targets, dropout=0.3))
    model.double()
    torch.manual_seed(8)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # B begins with zeros, which hide A's gradients
    torch.manual_seed(9)
    wanted = loss_of(model, batch)
    wanted.backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    shard = TensorShard(rank=rank, size=2, by_tokens=by_tokens)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    divisions = own_divisions(model, ModelPlan(target="its:own", tp_plan=styles))
    assert divisions is not None
    splits = divide_parameters_(model, divisions, shard)
    apply_styles_(model, divisions, shard)
    partial = partial_parameters(model, divisions, shard, splits)
    divided = [name for name, _ in adapters.adapted(model).items() if f"{name}.weight" in splits]
    of_adapters = {name for name in splits if ".lora_" in name}
    magnitudes = {key for key in of_adapters if "magnitude" in key}
    partly = {key for key in partial if "magnitude" in key}
    assert len(of_adapters - magnitudes) == len(divided) >= 8  # one of the two matrices each
    assert len({key for key in partial if ".lora_" in key} - partly) == len(divided)
    assert len(magnitudes | partly) == (len(divided) if name == "dora" else 0)
    torch.manual_seed(9)
    found = loss_of(model, batch)
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    for name, gradient in whole.items():
        own = dict(model.named_parameters())[name].grad
        own = shard.sum(own) if name in partial else own
        part = part_of(gradient, splits[name]) if name in splits else gradient
        assert gradient.abs().max() > 1e-6, name
        assert (own - part).abs().max() <= 1e-12 * gradient.abs().max(), name


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    loss: Tensor = output[0] if isinstance(output, tuple) else output
    return loss


def test_an_adapter_of_a_layer_that_works_on_parts_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    adapters.attach_(model, AdapterPlan(rank=2, alpha=2.0, targets=("0",)))
    (problem,) = problems_of({"0": SUMMED}, model)
    assert "modules without an adapter (0 has one)" in str(problem)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_on_four_ranks_equal_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Their first updates come from B alone, so that there are two."""
    axes = ("--world-sizes", "4", "--tp", "2", "--cp", "2", "--plugins", "zero1,zero3")
    options = ("--accumulation", "4", "--optimizer", "recipe", "--steps", "2", *LORA, ALL)
    cases = verified(capsys, *axes, *options, EMBEDDING)
    assert [case["plugin"] for case in cases] == ["zero1", "zero3"]
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutant", "says"),
    [("leaves_norms_partial", "gradient of"), ("cuts_adapters_alike", "initial value")],
)
def test_a_fault_in_dividing_adapters_is_found(
    mutant: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    options = ("--plugins", "zero3", "--accumulation", "1", "--steps", "2")
    options += (*LORA, ALL, EMBEDDING)
    (case,) = verified(capsys, "--world-sizes", "2", "--tp", "2", *options)
    assert not case["passed"]
    assert says in case["difference"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", [None, "adds_adapters_to_sums"])
def test_a_hugging_face_model_trains_and_exports_as_plain_transformers_with_its_adapters(
    mutant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    if mutant:
        monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    folder = hf.make_directory("llama", tmp_path / "llama")
    options = (*LORA, "adapter.targets=[q_proj,v_proj,o_proj,*mlp*]", "mesh.tp=2")
    plan = plan_of("llama", folder, "zero3", *options, "checkpoint.content=trained")
    monkeypatch.setattr(
        runner,
        "run_reference",
        lambda plan, *, steps: hf.fine_tune(plan, adapters_at_first(plan), steps=steps),
    )
    (result,) = runner.verify([plan], tmp_path / "cases", tolerance=Tolerance())
    assert result.passed == (mutant is None), result.difference
    if mutant is None:
        case, to = runner.case_of(tmp_path / "cases", 2, 0), tmp_path / "exported"
        export(case, case.plan(), to, Choice(), progress=lambda what, done, total: None)
        assert (logits_of(to) - logits_of_checkpoint(case, plan)).abs().max().item() <= 1e-5
        assert (logits_of(to) - logits_of(folder)).abs().max().item() > 1e-2, "it did not train"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_go_on_with_another_number_of_parts(colotrain: Colotrain) -> None:
    options = (*SMALL, *HEADS, *LORA, ALL, "optim.lr=0.02", "optim.schedule.name=constant")
    options += ("observe.grads_every=1", "checkpoint.every=2", "train.eval_steps=0")
    alone = ("cluster.procs_per_node=1", "plugin=zero1")
    whole = colotrain.run(*options, *alone, "train.max_steps=4", "name=whole")
    colotrain.run(*options, "mesh.tp=2", "plugin=zero3", "train.max_steps=2", "name=divided")
    resumed = colotrain("resume", "divided", "train.max_steps=4", *alone, "mesh.tp=1", "--json")
    assert losses(resumed.json) == pytest.approx(losses(whole), abs=1e-6)
    expected, found = (
        [e.fields for e in colotrain.events(name) if e.kind == "gradients"]
        for name in ("whole", "divided")
    )
    assert len(expected) == len(found) == 4
    for before, after in zip(expected, found, strict=True):
        assert after["status"] == before["status"]
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-4, abs=1e-7)
