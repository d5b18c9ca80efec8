"""Data and teachers that changed since a checkpoint was made are told when a run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare.identity import identities
from colotrain.engine.checkpoint.sources import sources_of, warnings_of
from colotrain.spec.plan import DataPlan


def plan_of(path: Path, **changes: Any) -> DataPlan:
    return DataPlan(
        source="path",
        paths=(str(path),),
        seq_len=8,
        tokenizer="bytes",
        shuffle=False,
        validation_fraction=0.0,
        **changes,
    )


def warned(now: dict[str, str], then: dict[str, str], *settings: str) -> list[str]:
    run: Any = SimpleNamespace(sources=now)
    manifest: Any = SimpleNamespace(sources=then, step=4)
    return [*warnings_of(run, manifest, [*settings])]


@pytest.mark.parametrize("name", ["text.txt", "tokens.bin"])
def test_an_identity_is_that_of_the_content_wherever_it_is(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    content = np.arange(97, 97 + 20, dtype="<u2").tobytes() * 500
    if name == "text.txt":
        content = content.replace(b"\0", b" ")
    found = []
    for folder, changed in (("a", False), ("b", False), ("a", True)):
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content if not changed else content[:-2] + b"z ")
        os.utime(file, (5 + len(found), 5 + len(found)))
        found.append(identities(plan_of(file)))
    assert found[0] == found[1] != found[2]


def test_what_differs_is_told_in_one_line_each() -> None:
    same = {"data": "x", "teacher": "t"}
    assert warned(same, dict(same)) == []
    assert warned(same, {}) == []  # of an older version
    (line,) = warned({**same, "data": "y"}, same)
    assert line.startswith("was made with data files of another content: the order of samples")
    assert "step 5" in line
    assert warned({"num_samples": "9"}, {"num_samples": "10"})[0].startswith(
        "was made with 10 samples of data.target, of which there are 9 now"
    )
    first, second = warned({"data": "y", "teacher": "u"}, same, "train.seed")
    assert first.startswith("was made with another train.seed: the order")
    assert "train.distill.teacher" in second
    (line,) = warned({"reference": "b"}, {"reference": "a"})
    assert "the reference from step 5 on" in line


def test_a_stream_and_an_own_dataset_are_known_by_their_length_alone() -> None:
    own: Any = SimpleNamespace(
        data=SimpleNamespace(source="target", pairs=False),
        model=SimpleNamespace(distill=None, hf=None),
    )
    assert sources_of(own, num_samples=12) == {"num_samples": "12"}
    assert sources_of(own, num_samples=2**63 - 1) == {}
