"""Answers with a label as records and samples, and their loss against the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colotrain.data.prepare.conversations import CHATML, Renderer
from colotrain.data.prepare.prepared import OF_BAD_ANSWER
from colotrain.data.prepare.records import BadRecord
from colotrain.data.read.packing import RatedSamples
from colotrain.models.llm import LLM
from colotrain.models.objective import as_global_batch, attach_, output_of
from colotrain.models.objectives.kto import rows_of
from colotrain.spec.objectives import KTO
from colotrain.spec.plan import ModelPlan

RATED = Renderer(columns={}, loss_on="answers", template=CHATML, rated=True)
SETTINGS = KTO(beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
VOCAB, SEQ = 19, 9


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def learned(record: dict) -> tuple[list[str], bool]:
    (document,) = RATED.documents(record)
    assert document.answers is not None
    return [document.text[start:stop] for start, stop in document.answers], document.is_bad


def test_a_record_is_a_prompt_an_answer_and_whether_it_is_good() -> None:
    assert learned({"prompt": "1 + 1 = ", "completion": "2", "label": True}) == (["2"], False)
    assert learned({"prompt": "1 + 1 = ", "completion": "3", "label": "False"}) == (["3"], True)
    assert learned({"prompt": "1 + 1 = ", "completion": "3", "label": 0}) == (["3"], True)
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    answer = [said("assistant", "d")]
    found = learned({"prompt": turns, "completion": answer, "label": False})
    assert found == (["d<|im_end|>"], True)
    assert learned({"messages": turns + answer, "label": False}) == found


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "a", "completion": "b"}, "expected prompt, completion, label; it has prompt"),
        (
            {"prompt": "a", "completion": "b", "label": "so"},
            "label: expected true or false, not 'so'",
        ),
        ({"prompt": "a", "completion": "", "label": True}, "completion: it is empty"),
        ({"text": "a", "label": True}, "expected prompt and completion"),
    ],
)
def test_what_is_no_answer_with_a_label_is_said(record: dict, why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        RATED.documents(record)


def test_without_the_objective_a_bad_answer_is_no_example() -> None:
    renderer = Renderer(columns={}, loss_on="answers", template=CHATML)
    with pytest.raises(BadRecord, match=r"train\.objective=kto learns to avoid it"):
        renderer.documents({"prompt": "a", "completion": "b", "label": False})


def document(number: int, prompt: int, answer: int, *, good: bool = True) -> Any:
    """A prompt of `10 number`, and an answer of `10 number + 1`."""
    ids = np.array([10 * number] * prompt + [10 * number + 1] * answer)
    targets = np.array([0] * prompt + [1 if good else OF_BAD_ANSWER] * answer, np.uint8)
    return ids, targets


def test_each_answer_stands_with_one_other_prompt() -> None:
    documents = [document(n, 2 + n % 3, 1 + n % 4, good=n % 2 == 0) for n in range(1, 12)]
    samples = RatedSamples(documents, SEQ)
    others = []
    for number, sample in enumerate((samples[index] for index in range(11)), start=1):
        (own, other), (labels, other_labels) = sample["input_ids"], sample["labels"]
        prompt, answer = 2 + number % 3, 1 + number % 4
        assert own[: prompt + answer].tolist() == documents[number - 1][0].tolist()
        assert other[:prompt].tolist() == [10 * number] * prompt
        other_number = int(other[prompt]) // 10
        assert labels[labels >= 0].tolist() == [10 * number + 1] * answer
        wanted = [10 * other_number + 1] * (1 + other_number % 4)
        assert other_labels[other_labels >= 0].tolist() == wanted[: SEQ - prompt]
        assert int(other_labels[prompt - 1]) == int(other[prompt])
        assert int(sample["is_good"]) == (number % 2 == 0)
        others.append(other_number)
        assert other_number != number
    assert sorted(others) == list(range(1, 12))
    again = RatedSamples(documents, SEQ)
    assert all(torch.equal(again[i]["input_ids"], samples[i]["input_ids"]) for i in range(11))


def batch_of(num: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (num, 2, SEQ + 1), generator=draw)
    labels = ids[..., 1:].clone()
    labels[..., :3] = -100
    labels[1, 0] = labels[2, 1] = -100  # cut before the answer
    return {
        "input_ids": ids[..., :-1],
        "labels": labels,
        "is_good": torch.arange(num) % 3 % 2,
        "reference_log_probs": torch.randn(num, 2, generator=draw, dtype=torch.float64) - 40,
    }


def model_of() -> LLM:
    torch.manual_seed(2)
    model = LLM(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=1).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    attach_(model, ModelPlan(target="", objective=SETTINGS))
    return model


def log_probs(model: LLM, batch: dict[str, Tensor], row: int) -> Tensor:
    labels = batch["labels"][:, row]
    logs = model(input_ids=batch["input_ids"][:, row]).log_softmax(-1)
    picked = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (picked * (labels >= 0)).sum(-1)


def formula(model: LLM, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean loss and KL of a global batch, as TRL's KTOTrainer has them."""
    reference = batch["reference_log_probs"]
    counted = (batch["labels"] >= 0).any(-1)
    with torch.no_grad():
        of_others = (log_probs(model, batch, 1) - reference[:, 1])[counted[:, 1]]
    kl = of_others.mean().clamp(min=0)
    ratios, good = log_probs(model, batch, 0) - reference[:, 0], batch["is_good"] == 1
    own = counted[:, 0]
    chosen = 1 - F.sigmoid(SETTINGS.beta * (ratios[good & own] - kl))
    rejected = 1 - F.sigmoid(SETTINGS.beta * (kl - ratios[~good & own]))
    losses = SETTINGS.desirable_weight * chosen, SETTINGS.undesirable_weight * rejected
    return torch.cat(losses).mean(), kl


@pytest.mark.parametrize("shift", [0.0, 60.0])
def test_the_loss_is_the_formulas(shift: float) -> None:
    """With a reference that finds everything likelier, KL is at its lower limit, 0."""
    model, batch = model_of(), batch_of(7)
    batch["reference_log_probs"] += shift
    wanted, kl = formula(model, batch)
    wanted.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found = output_of(model, as_global_batch(model, batch))
    total, count = found["loss"]
    (total / count).backward()
    assert int(count) == 6
    assert (float(kl) == 0.0) == (shift > 0)
    assert found["kl"][0] / found["kl"][1] == pytest.approx(float(kl))
    assert (total / count).item() == pytest.approx(wanted.item(), abs=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-12)
    assert int(found["reward_chosen"][1]) + int(found["reward_rejected"][1]) == 6


def test_rows_are_those_of_other_records_answers() -> None:
    model, batch = model_of(), batch_of(4)
    found = rows_of(model, batch)
    wanted = log_probs(model, batch, 1) - batch["reference_log_probs"][:, 1]
    assert torch.allclose(found[[0, 1, 3], 0], wanted[[0, 1, 3]])
    assert found[:, 1].tolist() == [1, 1, 0, 1]
