"""Preference pairs as records, and their loss against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from colotrain.data.prepare.conversations import CHATML, Renderer
from colotrain.data.prepare.records import BadRecord
from colotrain.models.objectives.dpo import loss_of

PAIRS = Renderer(columns={}, loss_on="answers", template=CHATML, pairs=True)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def learned(record: dict) -> list[tuple[str, str]]:
    """Text before what is learned, and what is learned, of both documents."""
    found = []
    for document in PAIRS.documents(record):
        assert document.answers is not None
        ((start, stop),) = document.answers
        found.append((document.text[:start], document.text[start:stop]))
    return found


def test_texts_are_a_prompt_and_two_answers() -> None:
    found = learned({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
    assert found == [("2 + 2 = ", "4"), ("2 + 2 = ", "5")]


def test_messages_may_repeat_the_prompt_or_follow_it() -> None:
    yes, no, ask = said("assistant", "yes"), said("assistant", "no"), said("user", "so?")
    apart = learned({"prompt": [ask], "chosen": [yes], "rejected": [no]})
    assert [answer for _, answer in apart] == ["yes<|im_end|>", "no<|im_end|>"]
    assert apart[0][0] == apart[1][0] == "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert learned({"chosen": [ask, yes], "rejected": [ask, no]}) == apart
    assert learned({"prompt": "so?", "chosen": [ask, yes], "rejected": [ask, no]}) == apart
    assert learned({"prompt": "so?", "chosen": [yes], "rejected": [no]}) == apart


def test_turns_that_both_share_are_not_learned() -> None:
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    both = ([*turns, said("assistant", answer)] for answer in ("d", "e"))
    found = learned(dict(zip(("chosen", "rejected"), both, strict=True)))
    assert [answer for _, answer in found] == ["d<|im_end|>", "e<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, "expected prompt, chosen and rejected; it has prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: it is empty"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [said("assistant", "c")]},
            "rejected: expected",
        ),
        ({"chosen": "b", "rejected": "c"}, "expected prompt: without it both answers are lists"),
        (
            {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "a")]},
            "chosen and rejected: expected two answers, they are the same",
        ),
    ],
)
def test_what_is_no_pair_is_said(record: dict, why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        PAIRS.documents(record)


def test_the_loss_is_the_formulas_and_a_pair_without_an_answer_does_not_count() -> None:
    generator = torch.Generator().manual_seed(11)
    losses = torch.rand(3 * 2 * 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.ones(3, 2, 5, dtype=torch.int64)
    labels[1, 1] = -100
    reference = -torch.rand(3, 2, generator=generator, dtype=torch.float64) * 5
    found = loss_of({"labels": labels, "reference_log_probs": reference}, (losses, 30), beta=0.3)
    expected, correct, values = 0.0, 0, losses.detach().view(3, 2, 5)
    for pair in (0, 2):
        chosen, rejected = (-values[pair, i].sum().item() for i in (0, 1))
        first, second = reference[pair].tolist()
        margin = 0.3 * ((chosen - first) - (rejected - second))
        expected += math.log(1 + math.exp(-margin))
        correct += margin > 0
    total, count = found["loss"]
    assert (total.item(), count.item()) == (pytest.approx(expected, rel=1e-12), 2)
    assert found["reward_accuracy"][0].item() == correct
    total.backward()
    assert losses.grad is not None
    assert not losses.grad.view(3, 2, 5)[1].any()
    assert losses.grad.view(3, 2, 5)[0].any()
