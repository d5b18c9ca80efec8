"""Every architecture of transformers that has a task: a directory starts, or is refused by name.

A run on two ranks begins with the loss that plain transformers has on the same samples.
EVERY_COMBINATION=1 tries all of them, which takes an hour; else some of each kind are tried.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colotrain.models.huggingface_task import TASKS
from tests.architectures import Architecture, architectures
from tests.dist.conftest import Colotrain
from tests.dist.test_run import losses
from tests.representatives import chosen, half_of_the_day

transformers = pytest.importorskip("transformers")
BUFFERS = ("bart", "resnet", "deepseek_v3", "marian", "mobilenet_v2")
PARTS = ("gemma3", "fuyu", "mllama")
OTHER = ("mamba2", "xlnet", "prophetnet", "cpmant", "t5", "deberta-v2", "swin")
TRIED = chosen(
    architectures(), among=[a for a in architectures() if a.kind in (*BUFFERS, *PARTS, *OTHER)]
)
REFUSED = {
    "bert-generation": "sees all tokens: is_decoder is false",
    "diffusion_gemma": "it finds the hidden tokens",
    "paligemma": "it sees all tokens of a text",
    "pi0": "its loss is of a robot's actions",
    "cpmant": "it sees all tokens of a sample",
    "prophetnet": "its loss is of several next tokens",
    "xlm": "sees all tokens: causal is false",
    "xlnet": "sees all tokens: attn_type is bi",
}
"""Type → why its directories do not start."""
MICRO_BATCH, GLOBAL_BATCH = 2, 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tried", half_of_the_day(TRIED), ids=str)
def test_a_directory_begins_with_the_loss_of_transformers_or_is_refused_by_name(
    tried: Architecture, tmp_path: Path
) -> None:
    try:
        made = tried.make(tmp_path / "made")
        theirs = type(made).from_pretrained(tmp_path / "made", dtype=torch.float32).train()
        wanted = loss_of(theirs, tried)
    except Exception as error:  # whatever the library raises about sizes that do not fit
        pytest.skip(f"no tiny {tried.kind} was made: {type(error).__name__}: {error}")
    result = Colotrain(tmp_path)(
        "run",
        f"model.hf={tmp_path / 'made'}",
        "data.target=tests.architectures:samples_of",
        f"+data.args.kind={tried.kind}",
        "data.shuffle=false",
        "data.validation_fraction=0",
        f"train.global_batch={GLOBAL_BATCH}",
        f"train.micro_batch={MICRO_BATCH}",
        "train.max_steps=1",
        "plugin=zero3",
        "cluster.procs_per_node=2",
        "--json",
    )
    assert "Traceback" not in result.err
    if tried.kind in REFUSED:
        assert result.code == 2
        assert REFUSED[tried.kind] in result.err
        assert not (tmp_path / "runs").exists(), "ranks were started"
        return
    assert result.code == 0, result.err
    assert losses(result.json)[0] == pytest.approx(wanted, rel=1e-5)
    if tried.task.predicts_next:
        assert later_tokens_are_unseen(theirs.eval(), tried)


@torch.no_grad()
def loss_of(model: Any, tried: Architecture) -> float:
    """The loss of a step: the mean over all targets, of micro-batches in training mode."""
    samples = tried.samples(model.config, GLOBAL_BATCH)
    shifted = tried.task.predicts_next
    total, count = 0.0, 0
    for first in range(0, GLOBAL_BATCH, MICRO_BATCH):
        chosen_samples = samples[first : first + MICRO_BATCH]
        batch = {n: torch.stack([s[n] for s in chosen_samples]) for n in samples[0]}
        targets = batch.get("labels", torch.zeros(MICRO_BATCH))
        if shifted:
            batch["shift_labels"] = batch["labels"]  # which are shifted already
        number = int((targets != -100).sum())
        total += model(**batch).loss.item() * number
        count += number
    return total / count


@torch.no_grad()
def later_tokens_are_unseen(model: Any, tried: Architecture) -> bool:
    ids: Tensor = tried.samples(model.config, 1)[0]["input_ids"][None]
    other = ids.clone()
    other[0, -1] = ids[0, -1] % 100 + 3
    pair = [model(input_ids=each).logits[0, :-1] for each in (ids, other)]
    return torch.allclose(*pair, atol=1e-5)


def test_more_than_sixty_types_are_known_and_each_task_has_one() -> None:
    assert len(architectures()) >= 200
    assert {a.task for a in architectures()} >= {t for t in TASKS if t.name != "multiple choice"}
