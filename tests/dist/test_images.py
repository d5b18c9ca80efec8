"""Conversations with images under plugins, against plain transformers and the processor's batch."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.verify import runner
from colotrain.verify.compare import CaseResult, Tolerance
from colotrain.verify.trajectory import Trajectory
from tests import image_text
from tests.dist.conftest import Colotrain
from tests.dist.hf import decays
from tests.image_text import ImageText
from tests.representatives import half_of_the_day

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
STEPS, GLOBAL = 2, 4
SEQ_LEN = {
    "Gemma 3": 144,
    "LLaVA": 112,
    "LLaVA of experts": 112,
    "LLaVA-NeXT": 256,
    "Idefics 3": 256,
    "Qwen2.5-VL": 176,
}
NEEDS = {"Qwen2.5-VL": "torchvision"}
DIVISIONS = {
    "zero1": (2, 1),
    "zero3": (1, 2),
    "gemini": (2, 2),
    "zero2": (1, 4),
    "fsdp-hybrid": (2, 1),
}
"""Plugin → ranks, and samples of a micro-batch."""


Case = tuple[str, int, int, tuple[str, ...]]
AXES: dict[str, tuple[Case, ...]] = {
    "tp": (
        ("zero1", 2, 4, ("mesh.tp=2",)),
        ("zero3", 2, 1, ("mesh.tp=2", "train.activation_checkpointing=full")),
        ("gemini", 4, 1, ("mesh.tp=2",)),
    ),
    "sequence parallel": (("zero3", 2, 1, ("mesh.tp=2", "mesh.sequence_parallel=true")),),
    "pp": (
        ("zero1", 2, 1, ("mesh.pp=2",)),
        ("zero3", 4, 1, ("mesh.pp=2", "train.activation_checkpointing=full")),
        ("gemini", 2, 4, ("mesh.pp=2",)),
    ),
    "cp": (
        ("zero1", 2, 1, ("mesh.cp=2",)),
        ("zero3", 4, 1, ("mesh.cp=2", "train.activation_checkpointing=full")),
        ("gemini", 2, 4, ("mesh.cp=2",)),
    ),
    "ep": (
        ("zero1", 2, 1, ("mesh.ep=2",)),
        ("zero3", 2, 2, ("mesh.ep=2", "train.activation_checkpointing=full")),
    ),
}
"""Axis → cases: plugin, ranks, samples of a micro-batch, and settings."""


IN_TURN = [
    *((family, "cp") for family in (image_text.LLAVA, image_text.IDEFICS3)),
    *((family, "pp") for family in (image_text.GEMMA3, image_text.LLAVA, image_text.IDEFICS3)),
    *((family, "tp") for family in (image_text.GEMMA3, image_text.LLAVA, image_text.IDEFICS3)),
    (image_text.LLAVA_NEXT, "sequence parallel"),
    (image_text.LLAVA_OF_EXPERTS, "ep"),
]


def plan_of(
    folder: Path,
    data: Path,
    family: ImageText,
    plugin: str,
    division: tuple[int, int] | None = None,
    settings: tuple[str, ...] = (),
) -> RunPlan:
    ranks, micro = division or DIVISIONS[plugin]
    return plan_from(
        [
            *(f"model.hf={folder}", f"data.path={data}", "data.images=true", f"plugin={plugin}"),
            *("data.shuffle=false", "data.validation_fraction=0", "train.eval_steps=0"),
            *(f"data.seq_len={SEQ_LEN[family.name]}", f"train.global_batch={GLOBAL}"),
            *(f"train.micro_batch={micro}", f"train.max_steps={STEPS}", "train.grad_clip=null"),
            *("optim.name=sgd", "optim.lr=0.2", "optim.schedule.name=constant"),
            *(f"cluster.procs_per_node={ranks}", f"name={family.kind}-{plugin}", *settings),
        ]
    )


def trajectory(
    folder: Path, family: ImageText, plan: RunPlan, dtype: torch.dtype, *, seed: int
) -> Trajectory:
    """Plain torch: a global batch as the processor makes it, and transformers' own loss."""
    architecture = getattr(transformers, family.architecture)
    model = architecture.from_pretrained(folder).to(dtype).train()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=plan.optim.lr, momentum=plan.optim.betas[0])
    processor = transformers.AutoProcessor.from_pretrained(folder)
    records = image_text.conversations(STEPS * GLOBAL, seed=seed)
    losses, gradients, parameters = [], [], [_values(named)]
    for step in range(STEPS):
        own = range(step * GLOBAL, (step + 1) * GLOBAL)
        batch = processor(
            text=[processor.apply_chat_template(records[i][0], tokenize=False) for i in own],
            images=[records[i][1] for i in own],
            padding=True,
            padding_side="right",
            add_special_tokens=False,
            return_tensors="pt",
        )
        labels = labels_of(processor, batch["input_ids"], own, plan.data.seq_len)
        batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(_values({n: p.grad for n, p in named.items() if p.grad is not None}))
        optimizer.step()
        parameters.append(_values(named))
    return Trajectory(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        optimizer_steps=STEPS,
        frozen=frozenset(),
    )


def labels_of(processor: Any, ids: Tensor, own: range, seq_len: int) -> Tensor:
    """Tokens of answers with their ends, without those that a verification masks."""
    begin, end = processor.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    labels = torch.full_like(ids, -100)
    for row, index in enumerate(own):
        share = 1.0 if index % 6 == 0 else (index % 5) / 5
        is_answer = False
        for at, token in enumerate(ids[row].tolist()):
            if is_answer and at > round(share * seq_len):  # at 0 there is no label
                labels[row, at] = token
            is_answer = token == begin or (is_answer and token != end)
    return labels


def _values(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t.detach().float().clone() for n, t in tensors.items()}


def compare(
    family: ImageText,
    folder: Path,
    plugins: tuple[str, ...] = (),
    *,
    cases: tuple[Case, ...] = (),
    reference_seed: int = 0,
) -> list[CaseResult]:
    if (needed := NEEDS.get(family.name)) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"its processor needs {needed}")
    model = family.make(folder / "made")
    data = image_text.write_records(folder / "data", STEPS * GLOBAL)
    plans = [plan_of(model, data, family, plugin) for plugin in plugins]
    for plugin, ranks, micro, settings in cases:
        plans.append(plan_of(model, data, family, plugin, (ranks, micro), settings))
    reference = functools.partial(_reference, model, family, reference_seed)
    with mock.patch.object(runner, "run_reference", reference):
        return list(runner.verify(plans, folder / "cases", tolerance=Tolerance()))


def _reference(
    folder: Path, family: ImageText, seed: int, plan: RunPlan, *, steps: int
) -> Trajectory:
    return trajectory(folder, family, plan, torch.float64, seed=seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family", half_of_the_day(image_text.FAMILIES), ids=lambda family: family.kind
)
def test_samples_with_images_teach_as_in_plain_transformers(
    family: ImageText, tmp_path: Path
) -> None:
    results = compare(family, tmp_path, ("zero1", "zero3", "gemini"))
    assert not [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert max(result.max_abs_gradient for result in results) <= 1e-6
    largest = max(result.max_abs_loss for result in results)
    assert largest <= 1e-6 * 5.5  # the loss is log(260) as training begins


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "axis"), IN_TURN, ids=lambda value: getattr(value, "kind", value)
)
def test_ranks_that_divide_a_model_see_the_same_images(
    family: ImageText, axis: str, tmp_path: Path
) -> None:
    results = compare(family, tmp_path, cases=AXES[axis])
    assert not [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert max(result.max_abs_gradient for result in results) <= 1e-6


@pytest.mark.slow
def test_other_images_are_found(tmp_path: Path) -> None:
    results = compare(image_text.LLAVA, tmp_path, ("zero3",), reference_seed=1)
    assert results[0].max_abs_loss > 1e-2
    assert results[0].max_abs_gradient > 1e-2


@pytest.mark.slow
def test_a_run_is_verified_exported_and_checked(colotrain: Colotrain) -> None:
    image_text.GEMMA3.make(colotrain.cwd / "made")
    image_text.write_records(colotrain.cwd / "data", 24, in_files=False)
    common = (
        *("model.hf=made", "data.path=data/train.jsonl", "data.images=true", "data.seq_len=144"),
        *("train.global_batch=4", "train.micro_batch=1", "cluster.procs_per_node=2"),
        "freeze.patterns=[model.vision_tower.*]",
    )
    summary = colotrain.run(*common, "name=seen", "train.max_steps=3", "data.num_workers=1")
    assert summary["loss"]["last"] < summary["loss"]["first"]
    result = colotrain("export", "seen", "--to", "out", "--check", "--json")
    assert result.code == 0, result.err
    files = {path.name for path in (colotrain.cwd / "out").iterdir()}
    assert {"processor_config.json", "chat_template.jinja", "tokenizer.json"} <= files
    assert colotrain("export", "out", "--check").code == 0
    verified = colotrain("verify", *common, "plugin=zero3", "--json")
    assert verified.code == 0, verified.err
    assert json.loads(verified.out)["passed"]
