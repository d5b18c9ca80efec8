"""Notes in torch's store, into which anybody may write: ranks heed those of their round alone."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from colotrain.engine.comms.notes import Notes, round_key
from colotrain.engine.state import saving
from colotrain.engine.state.run_state import Stop
from colotrain.engine.step import monitor
from colotrain.engine.step.monitor import LEFT, Monitor
from colotrain.errors import ColotrainError
from colotrain.spec.elastic import ROUND_KEY


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
    run: Any = SimpleNamespace(progress=progress, stop=Stop(lambda: None))
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
    notes, name = Notes(store, "key"), f"{monitor.DEPARTED}/1"
    for forged in (b"", b"0" * 64):
        store.set(name, forged)
        assert notes.wait(name, is_over=lambda: True) is None
    notes.write(name, "")
    assert notes.wait(name, is_over=lambda: True) == ""


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Be a rank of so many."""

    def become(rank: int, world: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        round_key.cache_clear()

    yield become
    round_key.cache_clear()


def test_ranks_that_leave_ask_the_store_for_few_notes(
    store: dist.HashStore, become: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks each asked for a thousand, fifty times a second."""
    monkeypatch.setattr(monitor, "LEAVE_TOGETHER_S", 1.0)
    notes, asked = Notes(store, "key"), list[str]()
    read = notes.read

    def note(name: str) -> str | None:
        asked.append(name)
        return read(name)

    monkeypatch.setattr(notes, "read", note)
    become(7, 1000)
    monitor._depart(notes)
    assert 3 < len(asked) < 20
    assert set(asked) == {monitor.DEPARTED}
    for rank in range(1000):
        notes.write(f"{monitor.DEPARTED}/{rank}", "")
    become(0, 1000)
    asked.clear()
    monitor._depart(notes)
    assert len(asked) == 999
    assert read(monitor.DEPARTED) == ""


def test_ranks_without_a_key_do_not_trust_one_another(
    store: dist.HashStore, become: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took what anybody could sign: an empty key is known to all."""
    for environment in ({}, {ROUND_KEY: ""}):
        monkeypatch.delenv(ROUND_KEY, raising=False)
        monkeypatch.setattr(os, "environ", os.environ | environment)
        become(0, 2)
        with pytest.raises(ColotrainError, match=f"{ROUND_KEY} is not set"):
            Notes(store)
        become(0, 1)  # one process that no launcher has started
        Notes(store).write("n", "x")
        assert Notes(store).read("n") == "x"
        assert Notes(store, "").read("n") is None


def test_children_of_a_rank_do_not_inherit_the_key(
    store: dist.HashStore, become: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROUND_KEY, "key")
    become(0, 2)
    Notes(store).write("n", "x")
    assert ROUND_KEY not in os.environ
    assert Notes(store, "key").read("n") == Notes(store).read("n") == "x"


def test_a_stranger_who_deletes_a_note_while_it_is_read_holds_no_rank() -> None:
    """Between the question whether it is there and its reading, which then waited for a day."""
    day, moment = datetime.timedelta(days=1), datetime.timedelta(seconds=0.3)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = "127.0.0.1", server.port
    mine = dist.TCPStore(*words, is_master=False, wait_for_workers=False, timeout=day)

    class Deleting:
        """The rank's store, of which a stranger deletes all that the rank has seen."""

        def __getattr__(self, name: str) -> Any:
            def call(*given: Any) -> Any:
                result = getattr(mine, name)(*given)
                server.delete_key("n")
                mine.set_timeout(moment)  # in place of a day
                return result

            return call

    server.set("n", "x" * 64)
    notes = Notes(Deleting(), "key")
    assert notes.read("n") is None
    assert notes.read("n") is None
    assert server.num_keys() == 0, "a reader wrote something"


def test_a_save_that_cannot_reach_the_store_has_failed(
    become: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the background it ended without an error, and the step counted as saved."""

    def refused() -> None:
        raise dist.DistNetworkError("the store takes no more connections")

    become(1, 2)
    monkeypatch.setattr(saving, "Notes", refused)
    writing = saving.Save(
        number=0,
        temporary=tmp_path / "t",
        final=tmp_path / "f",
        pieces=[],
        manifest=None,  # type: ignore[arg-type]
        keep=1,
        patience_s=1.0,
    )
    writing.write(None, lambda: None)  # type: ignore[arg-type]
    assert writing.error == "rank 1: DistNetworkError: the store takes no more connections"


def test_a_note_is_read_as_it_was_written(store: dist.HashStore) -> None:
    for text in ("", "x", "rank 3: ä\n\0…", "0" * 100):
        Notes(store, "key").write("n", text)
        assert Notes(store, "key").read("n") == text
        assert Notes(store, "other").read("n") is None
