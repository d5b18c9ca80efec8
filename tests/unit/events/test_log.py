"""Events: writers never block or raise, readers take whatever they find."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import threading
from pathlib import Path

import pytest

from colotrain.events import log
from colotrain.events.event import Event
from colotrain.events.log import EventReader, EventWriter, lines_of, read
from colotrain.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def rank_file(rundir: RunDir, rank: int = 0, attempt: int = 0) -> Path:
    return rundir.event_file(rank=rank, attempt=attempt)


def kinds(found: list[Event]) -> list[str]:
    return [event.kind for event in found]


def test_what_is_written_is_read_back(rundir: RunDir) -> None:
    with EventWriter(rank_file(rundir, 3, 2)) as writer:
        writer.write_record("step", step=7, samples=[1, 2], loss=0.5, skipped=False, note='"a"\nb')
    (event,) = read(rank_file(rundir, 3, 2))
    assert (event.kind, event.rank, event.attempt) == ("step", 3, 2)
    assert event.t > 1e9
    fields = {"step": 7, "samples": [1, 2], "loss": 0.5, "skipped": False, "note": '"a"\nb'}
    assert event.fields == fields


def test_the_launchers_events_have_no_rank(rundir: RunDir) -> None:
    EventWriter(rundir.launcher_events).write_record("launch", world_size=2)
    (event,) = EventReader(rundir).poll()
    assert (event.rank, event.attempt) == (None, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_json_cannot_hold_travel_in_valid_json(rundir: RunDir, value: float) -> None:
    EventWriter(rank_file(rundir)).write_record("step", loss=value, parts=[value, {"x": value}])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(rank_file(rundir).read_text(), parse_constant=refuse)
    (event,) = read(rank_file(rundir))
    found = [event.fields["loss"], event.fields["parts"][0], event.fields["parts"][1]["x"]]
    assert all(isinstance(item, float) and str(item) == str(value) for item in found)


def test_values_json_does_not_know_are_written_as_text(rundir: RunDir) -> None:
    EventWriter(rank_file(rundir)).write_record("checkpoint", path=Path("/a/b"), seconds=math.nan)
    (event,) = read(rank_file(rundir))
    assert event.fields["path"] == "/a/b"


def test_events_wait_while_the_disk_is_full_and_are_written_when_there_is_room(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, whole = EventWriter(rank_file(rundir)), os.write
    writer.write_record("a")
    room = iter([0, 0, 25, 0])

    def limited(handle: int, data: bytes) -> int:
        if not (size := next(room)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(handle, data[:size])

    monkeypatch.setattr(os, "write", limited)
    for kind in ("b", "c", "d", "e"):  # of which only a part of the first fits
        writer.write_record(kind)
    assert capsys.readouterr().err.count("warning:") == 1
    assert kinds(read(writer.path)) == ["a"]
    monkeypatch.setattr(os, "write", whole)
    writer.close()
    assert kinds(read(writer.path)) == ["a", "b", "c", "d", "e"]
    assert writer.dropped == 0


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_waits_has_a_bound_and_the_newest_is_kept(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    writer, whole = EventWriter(rank_file(rundir)), os.write
    writer.write_record("a")
    room = iter([10] if is_cut else [])

    def limited(handle: int, data: bytes) -> int:
        if not (size := next(room, 0)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(handle, data[:size])

    monkeypatch.setattr(log, "MOST_WAITING", 200)
    monkeypatch.setattr(os, "write", limited)
    for number in range(20):
        writer.write_record("late", number=number)
    monkeypatch.setattr(os, "write", whole)
    writer.write_record("last")
    reader = EventReader(rundir)
    events = reader.poll()
    numbers = [event.fields["number"] for event in events[1:-1]]
    assert kinds(events[:1]) == ["a"]
    assert kinds(events[-1:]) == ["last"]
    assert numbers == list(range(20 - len(numbers), 20))
    assert 1 < len(numbers) < 5
    assert (writer.dropped, reader.skipped) == (20 - len(numbers), int(is_cut))


def test_a_folder_that_is_missing_holds_events_back_until_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = EventWriter(tmp_path / "later" / "rank00000-attempt0000.jsonl")
    writer.write_record("a")
    (tmp_path / "later").mkdir()
    writer.write_record("b")
    assert kinds(read(writer.path)) == ["a", "b"]
    assert writer.dropped == 0
    assert "events cannot be written" in capsys.readouterr().err


def test_a_warning_that_cannot_be_printed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError("No space left on device")

    monkeypatch.setattr("sys.stderr", FullDisk())
    EventWriter("/dev/full").write_record("step")


def test_an_event_cut_short_by_a_full_disk_is_completed(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, whole = EventWriter(rank_file(rundir)), os.write
    writer.write_record("first")
    monkeypatch.setattr(os, "write", lambda handle, data: whole(handle, data[:10]))
    writer.write_record("second")
    reader = EventReader(rundir)
    assert kinds(reader.poll()) == ["first"]
    monkeypatch.setattr(os, "write", whole)
    writer.write_record("third")
    assert kinds(reader.poll()) == ["second", "third"]
    assert (writer.dropped, reader.skipped) == (0, 0)
    assert "warning" in capsys.readouterr().err


def test_a_writer_goes_on_after_one_that_was_killed_inside_a_line(rundir: RunDir) -> None:
    rundir.launcher_events.write_bytes(b'{"t":1,"kind":"launch"}\n{"t":2,"ki')
    EventWriter(rundir.launcher_events).write_record("launch")
    assert kinds(EventReader(rundir).poll()) == ["launch", "launch"]


def test_an_endless_line_is_passed_over_and_what_is_written_later_is_read(rundir: RunDir) -> None:
    with rundir.launcher_events.open("wb") as file:
        file.truncate(1 << 40)
    readers = [EventReader(rundir), EventReader(rundir, outline=True), EventReader(rundir)]
    readers[2].skip_to_end()
    assert [reader.drain() for reader in readers] == [[], [], []]
    assert [reader.skipped for reader in readers] == [1, 1, 0]
    EventWriter(rundir.launcher_events).write_record("launch")
    assert [kinds(reader.drain()) for reader in readers] == [["launch"]] * 3
    assert list(lines_of(rundir.launcher_events)) == []


def test_a_line_that_is_being_written_is_skipped_whole_by_who_skips_to_the_end(
    rundir: RunDir,
) -> None:
    rundir.launcher_events.write_bytes(b'{"t":1,"kind":"la')
    reader = EventReader(rundir)
    reader.skip_to_end()
    with rundir.launcher_events.open("ab") as file:
        file.write(b'unch"}\n')
    assert kinds(reader.drain()) == ["launch"]


def test_threads_and_writers_of_one_file_never_mix_lines(rundir: RunDir) -> None:
    def write(name: str) -> None:
        writer = EventWriter(rundir.launcher_events)
        for _ in range(200):
            writer.write_record("note", text=name * 500)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = EventReader(rundir)
    texts = [event.fields["text"] for event in reader.poll()]
    assert sorted(texts) == sorted(name * 500 for name in "abcd" for _ in range(200))
    assert reader.skipped == 0


def test_a_thread_that_writes_while_another_does_loses_and_repeats_nothing(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a save's thread and the step's: the second begins while the first is within its write."""
    write = os.write
    with EventWriter(rundir.launcher_events) as writer:
        second = threading.Thread(target=writer.write_record, args=("note",), kwargs={"text": "b"})

        def written_by_both(handle: int, text: bytes) -> int:
            if not second.ident:
                second.start()
                second.join(0.3)
            return write(handle, text)

        monkeypatch.setattr(os, "write", written_by_both)
        writer.write_record("note", text="a")
        second.join(5)
        assert not second.is_alive()
    assert [e.fields["text"] for e in EventReader(rundir).drain()] == ["a", "b"]


def test_polls_return_only_what_is_new(rundir: RunDir) -> None:
    reader, writer = EventReader(rundir), EventWriter(rank_file(rundir))
    assert reader.poll() == []
    writer.write_record("a")
    assert kinds(reader.poll()) == ["a"]
    assert reader.poll() == []
    writer.write_record("b")
    EventWriter(rank_file(rundir, rank=1)).write_record("c")
    assert kinds(reader.poll()) == ["b", "c"]


def test_a_torn_last_line_waits_for_its_end(rundir: RunDir) -> None:
    reader, line = EventReader(rundir), b'{"t":1.0,"kind":"note","text":"\xc3\xa9"}\n'
    with rank_file(rundir).open("ab", buffering=0) as file:
        for part in (line[:5], line[5:32], line[32:-1]):  # once inside a character
            file.write(part)
            assert reader.poll() == []
        assert read(rank_file(rundir)) == []
        file.write(b"\n")
    assert [event.fields["text"] for event in reader.poll()] == ["é"]
    assert reader.skipped == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe",
        b"{",
        b"[1]",
        b"7",
        b"null",
        b"{}",
        b'{"t":1}',
        b'{"kind":"step"}',
        b'{"t":"soon","kind":"step"}',
        b'{"t":null,"kind":"step"}',
        b'{"t":NaN,"kind":"step"}',
        b'{"t":1,"kind":[2]}',
        b'{"t":1,"kind":"step"} {"t":1,"kind":"step"}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_event_is_skipped_and_counted(rundir: RunDir, garbage: bytes) -> None:
    event = b'{"t":1,"kind":"a"}\n'
    rank_file(rundir).write_bytes(event + garbage + b"\n\n" + event)
    reader = EventReader(rundir)
    assert kinds(reader.poll()) == ["a", "a"]
    assert reader.skipped == 1
    assert kinds(read(rank_file(rundir))) == ["a", "a"]


def test_events_of_several_files_come_by_time(rundir: RunDir) -> None:
    for rank, times in ((0, [1.0, 4.0]), (1, [2.0, 3.0])):
        writer = EventWriter(rank_file(rundir, rank))
        for t in times:
            writer.write_record("step", t=t)
    assert [event.t for event in EventReader(rundir).poll()] == [1.0, 2.0, 3.0, 4.0]


def test_a_clock_that_is_set_back_does_not_reorder_a_file(rundir: RunDir) -> None:
    writer = EventWriter(rank_file(rundir))
    for step, t in ((1, 10.0), (2, 5.0), (3, 6.0)):
        writer.write_record("step", t=t, step=step)
    assert [event.fields["step"] for event in EventReader(rundir).poll()] == [1, 2, 3]


def test_files_that_hold_no_events_are_left_alone(rundir: RunDir) -> None:
    for name in ("notes.txt", "rank0.jsonl", "rank00000-attempt0000.jsonl.swp"):
        (rundir.events / name).write_text('{"t":1,"kind":"a"}\n')
    rank_file(rundir).mkdir()
    assert EventReader(rundir).poll() == []


def test_a_reader_may_be_limited_to_some_ranks(rundir: RunDir) -> None:
    EventWriter(rundir.launcher_events).write_record("launch", t=1)
    for rank in range(3):
        EventWriter(rank_file(rundir, rank)).write_record("started", t=2 + rank)
    found = EventReader(rundir, ranks={1}).poll()
    assert [(event.kind, event.rank) for event in found] == [("launch", None), ("started", 1)]


def test_a_run_that_has_no_folder_yet_has_no_events(tmp_path: Path) -> None:
    assert EventReader(RunDir(tmp_path / "absent")).poll() == []


def test_a_poll_is_bounded_and_says_when_there_is_more(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "LINE_LIMIT", 1000)
    monkeypatch.setattr(log, "POLL_LIMIT", 1500)
    for rank in range(3):
        writer = EventWriter(rank_file(rundir, rank))
        for step in range(100):
            writer.write_record("step", t=1.0, step=step)
    reader, polls = EventReader(rundir), [[Event(kind="", t=0.0, fields={})]]
    while polls[-1] or reader.behind:
        polls.append(reader.poll())
        assert len(polls[-1]) < 100
    steps = [event.fields["step"] for found in polls[1:] for event in found if event.rank == 2]
    assert steps == list(range(100))
    assert sum(map(len, polls[1:])) == 300


def test_a_line_longer_than_any_event_is_passed_over(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "LINE_LIMIT", 1000)
    rank_file(rundir).write_bytes(b"x" * 5500 + b'\n{"t":1,"kind":"a"}\n')
    reader, found = EventReader(rundir), []
    for _ in range(8):
        found += reader.poll()
    assert kinds(found) == ["a"]
    assert reader.skipped > 0


def long_file(rundir: RunDir, rank: int, num_events: int = 500) -> EventWriter:
    writer = EventWriter(rank_file(rundir, rank))
    writer.write_record("started", t=0.5)
    for step in range(1, num_events + 1):
        writer.write_record("step", t=float(step), step=step)
    return writer


def test_an_outline_has_the_first_and_last_events_of_long_files(rundir: RunDir) -> None:
    writers = [long_file(rundir, rank) for rank in range(3)]
    reader = EventReader(rundir, outline=True)
    found = reader.poll()
    steps = {
        r: [e.fields["step"] for e in found if e.rank == r and e.kind == "step"] for r in (0, 1)
    }
    assert steps[0] == list(range(1, 501))
    assert steps[1] == list(range(steps[1][0], 501))
    assert 5 < len(steps[1]) < 100
    assert [event.rank for event in found if event.kind == "started"] == [0, 1, 2]
    assert reader.skipped == 0
    for step in (501, 502):
        writers[1].write_record("step", t=float(step), step=step)
    assert [event.fields["step"] for event in reader.poll()] == [501, 502]


def test_an_outline_has_last_words_however_long(rundir: RunDir) -> None:
    writer = long_file(rundir, 1)
    writer.write_record("failed", t=900.0, traceback="x" * 20_000)
    writer.write_record("note", t=901.0, text="y" * 3000)
    found = EventReader(rundir, outline=True).poll()
    assert kinds(found)[-2:] == ["failed", "note"]
    assert len(found) < 400


def test_an_outline_of_many_files_is_followed_in_turn(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "FILES_PER_POLL", 4)
    writers = [EventWriter(rank_file(rundir, rank)) for rank in range(20)]
    for writer in writers:
        writer.write_record("started", t=1.0)
    reader = EventReader(rundir, outline=True)
    assert len(reader.poll()) == 20
    for writer in writers:
        writer.write_record("step", t=2.0)
    polls = [reader.poll() for _ in range(6)]
    assert polls[0][0].rank == 0
    assert max(map(len, polls)) <= 5
    assert sorted(event.rank or 0 for found in polls for event in found) == list(range(20))


def test_what_was_there_before_may_be_passed_over(rundir: RunDir) -> None:
    writers = [long_file(rundir, rank) for rank in range(2)]
    with rank_file(rundir, 1).open("ab") as file:
        file.write(b'{"kind": "torn')
    rank_file(rundir, 2).write_bytes(b'{"kind": "only a part')
    reader = EventReader(rundir)
    reader.skip_to_end()
    assert reader.drain() == []
    writers[0].write_record("step", t=900.0, step=900)
    with rank_file(rundir, 2).open("ab") as file:
        file.write(b' of it", "t": 901.0}\n')
    assert kinds(reader.drain()) == ["step", "only a part of it"]
