"""Data and teachers that changed since a checkpoint was made are told when a run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare.identity import files_in_place, identity_of
from colotrain.data.prepare.tokens import prepare_all
from colotrain.engine.state import checkpoint
from colotrain.engine.state.manifest import Manifest
from colotrain.engine.state.sources import sources_of, tell_changed_files, warnings_of
from colotrain.spec.objectives import DPO, DistillPlan, ObjectivePlan
from colotrain.spec.plan import DataPlan, ModelPlan


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


def warned(
    now: dict[str, str],
    then: dict[str, str],
    *settings: str,
    objective: ObjectivePlan | None = None,
) -> list[str]:
    plan = SimpleNamespace(model=ModelPlan(target="mine:Model", objective=objective))
    run: Any = SimpleNamespace(saver=SimpleNamespace(sources=now), plan=plan)
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
        found.append(identity_of(prepare_all(plan_of(file))))
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
    now = {"data": "y", "teacher": "u"}
    first, second = warned(now, same, "train.seed", objective=DistillPlan(teacher="there"))
    assert first.startswith("was made with another train.seed: the order")
    assert "train.distill.teacher" in second
    (line,) = warned({"reference": "b"}, {"reference": "a"}, objective=DPO())
    assert "the reference from step 5 on" in line


def test_a_stream_and_an_own_dataset_are_known_by_their_length_alone() -> None:
    own: Any = SimpleNamespace(
        data=SimpleNamespace(source="target"),
        model=ModelPlan(target="mine:Model"),
        train=SimpleNamespace(precision="fp32"),
    )
    assert sources_of(own, [], num_samples=12) == {"num_samples": "12"}
    assert sources_of(own, [], num_samples=2**63 - 1) == {}


def test_data_that_change_before_a_restart_from_memory_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkpoint, "fill", lambda *_: None)
    run: Any = SimpleNamespace(
        rank=0,
        step=4,
        plan=SimpleNamespace(data=plan_of(Path("text.txt")), model=ModelPlan(target="mine:Model")),
        saver=SimpleNamespace(sources={"data": "now"}),
        events=SimpleNamespace(write=lambda event: told.append(getattr(event, "text", ""))),
    )
    for then in ("now", "before"):
        sources = {"data": then}
        copied: Any = SimpleNamespace(manifest=manifest(step=4, sources=sources), index={})
        checkpoint.restore_copy(run, copied)
    same, (warning, *_) = told[:1], told[1:]
    assert same == [""]
    assert warning.startswith("warning: the copy in memory was made with data files of another")


def manifest(**changes: Any) -> Manifest:
    counts = ("optimizer_steps", "micro_batches", "clean_steps", "world_size", "global_batch")
    fixed = {"plugin": "ddp", "loss_scale": None, "written_at": 0.0}
    return Manifest(**(dict.fromkeys(counts, 0) | fixed | changes))


def test_token_files_that_change_while_they_are_read_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    tokens, text, told = tmp_path / "tokens.bin", tmp_path / "text.txt", list[str]()
    np.arange(97, 97 + 900, dtype="<u2").tofile(tokens)
    text.write_text("a line of text\n" * 90)
    files = files_in_place([s for f in (tokens, text) for s in prepare_all(plan_of(f))])
    assert list(files) == [tokens]
    events = SimpleNamespace(write=lambda event: told.append(event.text))
    run: Any = SimpleNamespace(step=4, saver=SimpleNamespace(files_in_place=files), events=events)
    tell_changed_files(run)
    assert told == []
    os.truncate(tokens, 200)
    tell_changed_files(run)
    tell_changed_files(run)
    assert [str(tokens) in line and "step 4" in line for line in told] == [True]
    tokens.unlink()
    tell_changed_files(run)
    assert len(told) == 2
