"""Classification: the formula, texts of several lengths, and the head's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.models.loading import build_whole
from colotrain.models.objective import attach_, output_of
from colotrain.spec.objectives import ClassifyPlan
from colotrain.spec.plan import ModelPlan
from tests.dist.hf import make_directory

transformers = pytest.importorskip("transformers")

PAD, CLASSES = 7, ("bad", "fair", "good")


def encoder(folder: Path) -> Path:
    torch.manual_seed(4)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.BertConfig(num_attention_heads=4, initializer_range=0.2, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_loss_is_transformers_own_for_each_text_without_padding(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / kind
    made = make_directory("llama", folder) if kind == "llama" else encoder(folder)
    objective = ClassifyPlan(class_names=CLASSES, pad_id=PAD)
    plan = ModelPlan(target="", hf=str(made), objective=objective)
    model: Any = build_whole(plan, seed=5).eval()
    attach_(model, plan)
    assert model.config.id2label == dict(enumerate(CLASSES))
    lengths, draw = torch.tensor([3, 12, 1, 7]), torch.Generator().manual_seed(2)
    ids = torch.randint(PAD + 1, 90, (4, 12), generator=draw)
    mask = (torch.arange(12) < lengths.unsqueeze(-1)).long()
    labels = torch.tensor([2, 0, 1, 1])
    found = output_of(model, {"input_ids": ids * mask, "padding_mask": mask, "labels": labels})
    model_of = transformers.AutoModelForSequenceClassification.from_pretrained
    theirs = model_of(made, num_labels=3, pad_token_id=PAD).eval()
    theirs.load_state_dict(model.state_dict())
    losses, right = [], 0
    for text, length, label in zip(ids, lengths, labels, strict=True):
        output = theirs(input_ids=text[:length].unsqueeze(0), labels=label.unsqueeze(0))
        losses.append(output.loss.item())
        right += output.logits.argmax().item() == label
    total, count = found["loss"]
    assert (total.item(), count) == (pytest.approx(sum(losses), abs=1e-5), 4)
    assert found["accuracy"][0].item() == right
