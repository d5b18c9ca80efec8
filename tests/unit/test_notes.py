"""Notes in torch's store, into which anybody may write: ranks heed those of their round alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from colotrain.engine import monitor
from colotrain.engine.monitor import LEFT, Monitor
from colotrain.engine.notes import Notes


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def forge(store: dist.HashStore, how: str) -> None:
    """What a stranger writes who knows the names, and all that was ever written."""
    earlier, now = Notes(dist.HashStore(), "of an earlier round"), Notes(dist.HashStore(), "key")
    earlier.write(LEFT, "7 preempted")
    now.write("colotrain/departed/7", "7 preempted")
    forged = {
        "plain": b"7 preempted",
        "of an earlier round": earlier.store.get(LEFT),
        "of another name": now.store.get("colotrain/departed/7"),
        "without a key": Notes(dist.HashStore(), "")._sign(LEFT, "7 preempted") + "7 preempted",
        "no text": b"\xff" * 80,
        "empty": b"",
        "short": b"7",
    }[how]
    store.set(LEFT, forged)


FORGED = ["plain", "of an earlier round", "of another name", "without a key", "no text", "empty"]


@pytest.mark.parametrize("how", FORGED)
def test_what_a_stranger_writes_ends_no_step(store: dist.HashStore, how: str) -> None:
    """`step-left` of the step that is under way made all ranks save, and the run end."""
    forge(store, how)
    progress = SimpleNamespace(undecided=True)
    run: Any = SimpleNamespace(progress=progress, reason_to_stop=lambda: None)
    watching, last = Monitor(run), SimpleNamespace(step=7)
    notes = Notes(store, "key")
    assert watching._reason(run, last, notes) is None  # type: ignore[arg-type]
    assert not watching.follows
    notes.write(LEFT, "7 preempted")
    watching.followed_at = 0.0
    assert watching._reason(run, last, notes) == "preempted"  # type: ignore[arg-type]


def test_a_rank_is_not_taken_for_gone_because_a_stranger_says_so(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a checkpoint taken for whole: its outcome is a note, too."""
    notes, names = Notes(store, "key"), [f"{monitor.DEPARTED}/{rank}" for rank in range(3)]
    notes.write(names[0], "")
    assert not notes.are_there(names)
    for name in names[1:]:
        store.set(name, b"")
    assert not notes.are_there(names)
    assert notes.read("checkpoint/1/0") is None
    store.set("checkpoint/1/0", b"0" * 64)
    assert notes.read("checkpoint/1/0") is None
    for name in names[1:]:
        notes.write(name, "")
    assert notes.are_there(names)


def test_a_note_is_read_as_it_was_written(store: dist.HashStore) -> None:
    for text in ("", "x", "rank 3: ä\n\0…", "0" * 100):
        Notes(store, "key").write("n", text)
        assert Notes(store, "key").read("n") == text
        assert Notes(store, "other").read("n") is None
