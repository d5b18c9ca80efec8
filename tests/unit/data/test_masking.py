"""Hidden tokens: BERT's rule, drawn as a function of seed and position, never of special tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colotrain.data.prepare.vocabulary import separator_of, special_tokens
from colotrain.data.read.inspection import sample_tokens
from colotrain.data.read.loader import BatchLoader, open_samples, order_of, read_batch
from colotrain.spec.objectives import MaskedPlan
from colotrain.spec.plan import BatchPlan, DataPlan
from tests.masked import LETTERS, make_tokenizer, write_texts

SEQ = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(folder: Path, path: Path, *, probability: float = 0.15, **changes: Any) -> DataPlan:
    found = special_tokens(str(folder))
    assert found is not None
    assert found.mask is not None
    masked = MaskedPlan(
        probability=probability,
        mask_id=found.mask,
        pad_id=found.pad or 0,
        begin_id=found.begin,
        end_id=found.end,
        special_ids=found.special,
        vocab_size=5 + len(LETTERS),
    )
    settings: dict[str, Any] = {"source": "path", "paths": (str(path),), "seq_len": SEQ}
    settings |= {"tokenizer": str(folder), "shuffle": True, "validation_fraction": 0.0}
    return DataPlan(**settings, masked=masked, **changes)


def batch_at(samples: Any, positions: range, seed: int = 7) -> dict[str, torch.Tensor]:
    order = order_of(samples, seed=seed, shuffle=False)
    return read_batch(samples, order, positions, draw_seed=seed)


@pytest.mark.parametrize(("style", "special"), [("bert", (4, 0, 2, 3)), ("roberta", (4, 1, 0, 2))])
def test_special_tokens_are_those_of_the_tokenizer(
    style: str, special: tuple[int, ...], tmp_path: Path
) -> None:
    make_tokenizer(tmp_path, style)
    found = special_tokens(str(tmp_path))
    assert found is not None
    assert (found.mask, found.pad, found.begin, found.end) == special
    assert found.special == (0, 1, 2, 3, 4)
    (tmp_path / "tokenizer_config.json").unlink()  # then the usual names
    assert special_tokens(str(tmp_path / "tokenizer.json")) == found
    assert special_tokens("bytes") is None


def test_documents_end_with_the_token_that_separates_where_there_is_no_end_of_text(
    tmp_path: Path,
) -> None:
    from colotrain.data.prepare.vocabulary import load

    make_tokenizer(tmp_path)
    assert separator_of(str(tmp_path), load(tmp_path / "tokenizer.json")) == 3


def test_a_document_is_framed_padded_and_its_targets_stand_at_their_own_places(
    tmp_path: Path,
) -> None:
    ids = make_tokenizer(tmp_path / "t")
    texts = write_texts(tmp_path / "a.jsonl", 60)
    samples = open_samples(plan_of(tmp_path / "t", tmp_path / "a.jsonl", packing="none"), "train")
    assert len(samples) == len(texts)
    num_targets = 0
    for index, text in enumerate(texts):
        row = {
            name: values[0].tolist()
            for name, values in batch_at(samples, range(index, index + 1)).items()
        }
        expected = [2, *(ids[letter] for letter in text[: SEQ - 2]), 3]
        padding = SEQ - len(expected)
        assert row["attention_mask"] == [1] * len(expected) + [0] * padding
        expected += [0] * padding
        for given, label, token in zip(row["input_ids"], row["labels"], expected, strict=True):
            assert label in (-100, token)
            if label == -100:
                assert given == token
            else:
                assert token > 4
                num_targets += 1
    assert num_targets > 50


def test_a_window_of_text_is_framed_once(tmp_path: Path) -> None:
    ids = make_tokenizer(tmp_path / "t")
    texts = write_texts(tmp_path / "a.jsonl", 60)
    stream = [token for text in texts for token in (*(ids[letter] for letter in text), 3)]
    samples = open_samples(plan_of(tmp_path / "t", tmp_path / "a.jsonl"), "train")
    assert len(samples) == len(stream) // (SEQ - 2)
    batch = batch_at(samples, range(len(samples)))
    rows = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
    ended = 0
    for index, row in enumerate(rows.tolist()):
        text = stream[index * (SEQ - 2) : (index + 1) * (SEQ - 2)]
        again = text[-1] == 3
        ended += again
        assert row == ([2, *text, 0] if again else [2, *text, 3])
        assert batch["attention_mask"][index].sum() == SEQ - again
    assert ended


def test_shares_are_those_of_berts_rule(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t")
    write_texts(tmp_path / "a.jsonl", 3000, longest=60)
    samples = open_samples(plan_of(tmp_path / "t", tmp_path / "a.jsonl"), "train")
    batch = batch_at(samples, range(len(samples)))
    given, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    total = int((given.where(~chosen, labels) > 4).sum())
    mask, same = chosen & (given == 4), chosen & (given == labels)
    other = chosen & ~mask & ~same
    num = int(chosen.sum())

    def near(count: float, of: int, share: float) -> None:
        assert abs(count / of - share) < 4 * (share * (1 - share) / of) ** 0.5

    words = 5 + len(LETTERS)
    near(num, total, 0.15)
    near(int(mask.sum()), num, 0.8 + 0.1 / words)
    near(int(same.sum()), num, 0.1 + 0.1 / words)
    near(int(other.sum()), num, 0.1 * (words - 2) / words)
    assert given[other].unique().tolist() == [i for i in range(words) if i != 4]
    places = chosen.sum(0)[1:-1]
    assert places.min() > 0.7 * places.double().mean()  # the first of a window as any


def test_draws_depend_on_seed_and_position_alone(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t")
    write_texts(tmp_path / "a.jsonl", 100)
    plan = plan_of(tmp_path / "t", tmp_path / "a.jsonl", packing="none")
    samples = open_samples(plan, "train")
    order = order_of(samples, seed=3, shuffle=True)

    def step(ranks: int, micro_batch: int, number: int) -> torch.Tensor:
        steps = 16 // ranks // micro_batch
        sizes = {"global_batch": 16, "micro_batch": micro_batch, "accumulation_steps": steps}
        batch = BatchPlan(**sizes, data_parallel=ranks)
        rows: dict[int, torch.Tensor] = {}
        for rank in range(ranks):
            loader = BatchLoader(samples, order, batch, rank, draw_seed=3)
            for index in reversed(range(steps)):
                found = loader.micro_batch(number, index)
                rows |= dict(zip(loader.positions(number, index), found["input_ids"], strict=True))
        return torch.stack([rows[position] for position in sorted(rows)])

    state = np.random.get_state()[1].copy()
    first = step(1, 16, 2)
    assert torch.equal(step(2, 4, 2), first)
    assert torch.equal(step(4, 1, 2), first)
    assert np.array_equal(np.random.get_state()[1], state)
    once, again = (batch_at(samples, range(at, at + 100))["labels"] for at in (0, 100))
    assert not torch.equal(once, again)  # another epoch hides others
    assert not torch.equal(batch_at(samples, range(100), seed=8)["labels"], once)


def test_only_answers_are_hidden_in_chats(tmp_path: Path) -> None:
    ids = make_tokenizer(tmp_path / "t")
    record = {"prompt": "what is this ", "completion": "an answer"}
    (tmp_path / "a.jsonl").write_text(4 * (json.dumps(record) + "\n"))
    plan = plan_of(tmp_path / "t", tmp_path / "a.jsonl", probability=0.9)
    samples = open_samples(plan, "train")
    batch = batch_at(samples, range(4))
    start = 1 + len(record["prompt"])
    assert (batch["labels"][:, :start] == -100).all()
    answer = torch.tensor([ids[letter] for letter in record["completion"]])
    found = batch["labels"][:, start : start + len(answer)]
    assert ((found == answer) | (found == -100)).all()
    assert (found != -100).sum() > 20


def test_files_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t")
    tokens = np.random.default_rng(0).integers(5, 32, 10 * SEQ).astype("<u2")
    tokens[::SEQ] = 2
    tokens.tofile(tmp_path / "tokens.bin")
    plan = dataclasses.replace(plan_of(tmp_path / "t", tmp_path / "tokens.bin"), format="nanogpt")
    samples = open_samples(plan, "train")
    assert len(samples) == 10
    batch = batch_at(samples, range(10))
    rows = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
    assert rows.flatten().tolist() == tokens.tolist()
    assert batch["attention_mask"].all()
    assert (batch["labels"][:, 0] == -100).all()


def test_inspection_shows_what_the_run_will_hide(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t")
    write_texts(tmp_path / "a.jsonl", 60)
    plan = plan_of(tmp_path / "t", tmp_path / "a.jsonl", packing="none")
    samples = open_samples(plan, "train")
    order = order_of(samples, seed=7, shuffle=True)
    row = read_batch(samples, order, range(5, 6), draw_seed=7)
    _, tokens = sample_tokens(plan, 5, seed=7)
    assert [token.in_loss for token in tokens] == (row["labels"][0] != -100).tolist()
    assert [token.document != -1 for token in tokens] == row["attention_mask"][0].bool().tolist()
