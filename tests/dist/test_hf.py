"""Hugging Face models under every plugin against plain transformers, and what is exported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.export.job import Choice
from colotrain.export.write import export
from colotrain.models.loading import build_whole
from colotrain.rundir import RunDir
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from colotrain.verify.compare import Tolerance
from colotrain.verify.trajectory import Trajectory
from tests.checkpoints import read_whole
from tests.dist import hf
from tests.dist.conftest import Colotrain
from tests.dist.test_run import losses
from tests.representatives import half_of_the_day

pytest.importorskip("transformers")

TARGETS = {"llama": "[q_proj,v_proj,*mlp*]", "gpt2": "[c_attn,c_fc]"}
LORA = ("adapter.name=lora", "adapter.rank=4", "adapter.alpha=8")
PREFIX = {
    "llama": "[model.embed_tokens.weight,model.layers.0.*]",
    "gpt2": "[transformer.wpe.*,transformer.h.0.*]",
}
STEPS = 3


def plan_of(kind: str, folder: Path, plugin: str, *overrides: str) -> RunPlan:
    return plan_from(
        [
            f"model.hf={folder}",
            "data.target=tests.dist.hf:samples",
            "data.shuffle=false",
            f"plugin={plugin}",
            "train.global_batch=8",
            "train.micro_batch=2",
            f"train.max_steps={STEPS}",
            "train.grad_clip=null",
            "optim.name=sgd",
            "optim.lr=0.2",
            "optim.schedule.name=constant",
            "cluster.procs_per_node=2",
            f"name={kind}-{plugin}",
            *overrides,
        ]
    )


def variants(kind: str) -> list[tuple[str, ...]]:
    return [
        (f"freeze.patterns={PREFIX[kind]}",),
        (*LORA, f"adapter.targets={TARGETS[kind]}", "checkpoint.content=trained"),
    ]


def adapters_at_first(plan: RunPlan) -> dict[str, torch.Tensor]:
    whole = build_whole(plan.model, seed=plan.train.seed)
    return {n: p.detach().clone() for n, p in whole.named_parameters() if ".lora_" in n}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", hf.KINDS)
def test_every_plugin_trains_and_exports_as_plain_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf.make_directory(kind, tmp_path / kind)
    more = list(itertools.product(ROWS, variants(kind)))
    for way in ("full", "selective"):
        recompute = f"train.activation_checkpointing={way}"
        more += [("zero3", (recompute, *variant)) for variant in variants(kind)]
    settings = [*((plugin, ()) for plugin in ROWS), *half_of_the_day(more, of=kind)]
    plans = [plan_of(kind, folder, plugin, *variant) for plugin, variant in settings]

    def reference(plan: RunPlan, *, steps: int) -> Trajectory:
        return hf.fine_tune(plan, adapters_at_first(plan), steps=steps)

    monkeypatch.setattr(runner, "run_reference", reference)
    results = list(runner.verify(plans, tmp_path / "cases", tolerance=Tolerance()))
    wrong = [f"{r.plugin} {r.freeze}: {r.difference}" for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)
    assert all(result.frozen_unchanged for result in results)
    for index, plan in enumerate(plans):
        run = runner.case_of(tmp_path / "cases", 2, index)
        to = tmp_path / f"exported-{index}"
        export(run, run.plan(), to, Choice(), progress=lambda what, done, total: None)
        logits = logits_of(to)
        expected = logits_of_checkpoint(run, plan)
        assert (logits - expected).abs().max().item() <= 1e-5, plan.name
        assert (logits - logits_of(folder)).abs().max().item() > 1e-2, "it did not train"


def inputs() -> torch.Tensor:
    return torch.stack([sample["input_ids"] for sample in hf.samples(4)])


def logits_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(input_ids=inputs()).logits


def logits_of_checkpoint(run: RunDir, plan: RunPlan) -> Any:
    """What the trained model itself computes: colotrain's module with the checkpoint's values."""
    model = build_whole(plan.model, seed=plan.train.seed).eval()
    stored = read_whole(run.checkpoint(STEPS))
    held = {n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")}
    if plan.checkpoint.content == "trained":
        assert all(".lora_" in name for name in held)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(held.get(name, parameter))
        return model(input_ids=inputs()).logits


@pytest.mark.slow
def test_a_checkpoint_of_what_trained_resumes_elsewhere_but_not_on_another_model(
    colotrain: Colotrain,
) -> None:
    folder = hf.make_directory("llama", colotrain.cwd / "llama")
    options = (
        *(f"model.hf={folder}", "data.target=tests.dist.hf:samples", "train.global_batch=8"),
        *(*LORA, "adapter.targets=[q_proj]", "checkpoint.content=trained", "optim.lr=0.05"),
        *("train.micro_batch=2", "train.eval_steps=1", "optim.schedule.name=constant"),
        "cluster.procs_per_node=2",
    )
    unfreeze = ("freeze.unfreeze={2:[model.layers.1.*]}",)
    whole = colotrain.run(*options, *unfreeze, "plugin=zero2", "train.max_steps=4")
    colotrain.run(*options, *unfreeze, "plugin=zero3", "train.max_steps=3", "name=half")
    held = read_whole(colotrain.rundir("half").checkpoint(3))
    names = {n.removeprefix("model.") for n in held if n.startswith("model.")}
    assert {n for n in names if ".lora_" not in n} == {
        n for n, _ in hf.plain(folder).named_parameters() if n.startswith("model.layers.1.")
    }
    changes = ("plugin=gemini", "cluster.procs_per_node=1")
    resumed = colotrain("resume", "half", *changes, "train.max_steps=4", "--json")
    assert losses(resumed.json) == pytest.approx(losses(whole), abs=1e-5)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    refused = colotrain("resume", "half", *changes, "train.max_steps=5")
    assert refused.code == 2
    assert "of a run that began with another model" in refused.err.splitlines()[-1]
