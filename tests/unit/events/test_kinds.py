"""Event kinds: what they write stays readable by others, and what others wrote stays readable."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from colotrain.events import gradients, kinds, machines
from colotrain.events.event import Event, EventKind
from colotrain.events.kinds import Evaluation, PeakMemory, Step, TierBytes
from colotrain.events.log import EventWriter, decode

GOLDEN = Path(__file__).parents[1] / "golden" / "events" / "each_kind.jsonl"
LINES = GOLDEN.read_bytes().splitlines(keepends=True)
KINDS = {
    cls.KIND: cls
    for module in (kinds, gradients, machines)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, EventKind) and cls is not EventKind
}


def event(kind: str, **values: Any) -> Event:
    return Event(kind=kind, t=2.0, rank=1, attempt=3, fields=values)


def test_every_kind_has_a_golden_line() -> None:
    assert {json.loads(line)["kind"] for line in LINES} == KINDS.keys() - {"noise"}


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["kind"])
def test_a_record_is_written_as_it_always_was(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.5)
    found = decode(line)
    assert found is not None
    cls = KINDS[found.kind]
    whole = {name: found.fields[name] for name, _ in cls._WRITTEN if name in found.fields}
    with EventWriter(tmp_path / "events.jsonl") as writer:
        writer.write(cls(**whole))
    assert (tmp_path / "events.jsonl").read_bytes() == line


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["kind"])
def test_a_record_is_read_as_it_was_written(line: bytes) -> None:
    found = decode(line, rank=0, attempt=0)
    assert found is not None
    read = KINDS[found.kind].of(found)
    values = {f.name: getattr(read, f.name) for f in fields(read)}
    values["samples"] = found.fields.get("samples")  # a step's are not read
    assert read.t == 1.5
    for name, value in found.fields.items():
        assert values[name] == value or (math.isnan(value) and math.isnan(values[name]))


@pytest.mark.parametrize("cls", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("junk", [None, "text", [], {}, math.nan, True, -1, 10**400, [[None]]])
def test_a_damaged_record_has_blanks(cls: type[EventKind], junk: Any) -> None:
    names = [f.name for f in fields(cls)]
    damaged = cls.of(event(cls.KIND, unknown=1, **dict.fromkeys(names, junk)))
    assert damaged.t == 2.0
    assert cls.of(event(cls.KIND)) == cls.of(event(cls.KIND, unknown=1))


def test_what_older_runs_lack_is_blank() -> None:
    old = Step.of(event("step", step=4, loss=2))
    assert (old.step, old.loss, type(old.loss), old.lr, old.peak) == (4, 2.0, float, None, 0)
    assert (old.attempt, old.skipped, old.busy_s) == (3, None, 0.0)
    assert Evaluation.of(event("eval", step=1, loss=1.0)).metrics is None
    assert PeakMemory.of(event("memory", optimizer=5)).breakdown().total == 5
    assert TierBytes.of(event("tiers", bytes={"parameters": 3})).bytes == {"parameters": {}}
