"""Records that are tokens already are taken as they are, or refused by file and line."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare.tokens import prepare
from colotrain.errors import ConfigError
from colotrain.spec.plan import DataPlan
from tests.formats import WRITERS

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(path: Path, **changes: Any) -> DataPlan:
    plan = DataPlan(
        source="path",
        paths=(str(path),),
        seq_len=32,
        tokenizer="bytes",
        num_workers=0,
        shuffle=False,
        validation_fraction=0.0,
        workers=1,
    )
    return replace(plan, **changes)


def rows_of(path: Path, **changes: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of each document."""
    made = prepare(plan_of(path, **changes))
    ends, found = made.document_ends("train"), made.targets("train")
    assert ends is not None
    found = np.ones(made.num_train, np.uint8) if found is None else found
    parts = (np.split(numbers, ends[:-1]) for numbers in (made.tokens("train"), found))
    return [(ids.tolist(), wanted.tolist()) for ids, wanted in zip(*parts, strict=True)]


def line(path: Path, **row: Any) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("kind", WRITERS)
def test_tokens_and_labels_come_back_from_every_format(tmp_path: Path, kind: str) -> None:
    draw = random.Random(0)
    rows, expected = [], []
    for _ in range(3000):  # several blocks
        ids = [draw.randrange(256) for _ in range(draw.randint(2, 9))]
        asked = [draw.randint(0, 1) for _ in ids[1:]] or [1]
        wanted = [0, *asked] if any(asked) else [0, *asked[:-1], 1]
        labels = [token if count else -100 for token, count in zip(ids, wanted, strict=True)]
        padding = draw.randint(0, 2)
        rows.append(
            {
                "input_ids": [*ids, *[0] * padding],
                "labels": [*labels, *[-100] * padding],
                "attention_mask": [1] * len(ids) + [0] * padding,
            }
        )
        expected.append((ids, wanted))
    assert rows_of(WRITERS[kind](tmp_path, rows)) == expected


def test_masks_say_what_is_trained_on(tmp_path: Path) -> None:
    path, ids, mask = tmp_path / "data.jsonl", [1, 2, 3, 4, 5], [0, 1, 0, 1, 1]
    for name in ("completion_mask", "assistant_masks"):
        line(path, input_ids=ids, **{name: mask})
        assert rows_of(path) == [(ids, mask)]
        assert rows_of(path, loss_on="last") == [(ids, [0, 0, 0, 1, 1])]
        assert rows_of(path, loss_on="all") == [(ids, [1] * 5)]
    line(path, input_ids=ids, labels=[-100, 2, 3, 4, 5], assistant_masks=mask)
    assert rows_of(path) == [(ids, mask)]
    line(path, input_ids=ids)
    assert rows_of(path) == [(ids, [1] * 5)]


def test_no_separator_and_padding_at_both_ends(tmp_path: Path) -> None:
    path = line(tmp_path / "data.jsonl", input_ids=[0, 7, 8, 0], attention_mask=[0, 1, 1, 0])
    assert rows_of(path) == [([7, 8], [1, 1])]


def test_text_beside_tokens_is_unread_and_said(tmp_path: Path) -> None:
    path = line(tmp_path / "data.jsonl", input_ids=[1, 2], text="abc")
    assert rows_of(path) == [([1, 2], [1, 1])]
    assert ["text beside it is not read" in n.text for n in prepare(plan_of(path)).notes] == [True]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [1, 256]}, "token 256, but data.tokenizer=bytes has 256 tokens"),
        ({"input_ids": [1, -1]}, "token -1"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": "abc"}, "list of whole numbers"),
        ({"input_ids": [1.5, 2]}, "list of whole numbers"),
        ({"input_ids": [[1, 2], [3]]}, "list of whole numbers"),
        ({"input_ids": [1, None]}, "list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 entries, input_ids has 2"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "shifted already"),
        ({"input_ids": [1, 2, 3], "labels": [1, 9, 3]}, "entry 1 is 9"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "none of its tokens is trained on"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "none of its tokens is trained on"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "between others"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "every token"),
    ],
)
def test_what_cannot_be_right_is_refused_by_file_and_line(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as error:
        prepare(plan_of(path))
    assert f"{path}:2" in str(error.value)
    assert told in str(error.value)


def test_a_tokenizer_made_from_text_cannot_have_made_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "abc abc"}\n{"input_ids": [1, 2]}\n')
    with pytest.raises(ConfigError, match="the tokenizer that made them"):
        prepare(plan_of(path, tokenizer="bpe-300"))
