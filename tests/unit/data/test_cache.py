"""The cache: made once, by one process, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colotrain.cache_folder import cache_folder
from colotrain.data.prepare import cache as cache_module
from colotrain.data.prepare.tokens import Prepared, is_prepared, prepare, prepare_all
from colotrain.errors import ColotrainError
from colotrain.spec.plan import DataPlan, PartPlan
from tests.formats import write_jsonl

ROOT = Path(__file__).parents[3]
HEAD = """
import os, sys, time
from colotrain.data.prepare.tokens import prepare
from colotrain.spec.plan import DataPlan
plan = eval(sys.argv[1])
"""

Run = Callable[[str, DataPlan], "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        words = random.choices(["one", "two", "three", "four", "five", "six"], k=500)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


def plan_of(path: Path, tokenizer: str = "bytes", fraction: float = 0.25) -> DataPlan:
    return DataPlan(
        source="path",
        paths=(str(path),),
        seq_len=8,
        tokenizer=tokenizer,
        shuffle=True,
        validation_fraction=fraction,
    )


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a process in which `plan`, `prepare`, `os` and `time` are at hand; it ends with us."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, plan: DataPlan) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HEAD + code, repr(plan)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def contents(prepared: Prepared) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.train.parent.iterdir()}


def reads_of(plan: DataPlan) -> tuple[Prepared, set[str]]:
    seen: set[str] = set()
    prepared = prepare(plan, progress=lambda what, done, total: seen.add(what))
    return prepared, seen


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.01)


def test_the_folder_is_the_first_of_three_that_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("COLOTRAIN_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "colotrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "colotrain"


def test_a_second_call_reads_nothing(corpus: Path) -> None:
    first, seen = reads_of(plan_of(corpus))
    second, seen_again = reads_of(plan_of(corpus))

    assert second == first
    assert "reading" in seen
    assert seen_again == set()


def test_a_changed_file_gives_another_entry_and_the_old_one_stays(corpus: Path) -> None:
    first = prepare(plan_of(corpus))
    before = contents(first)
    with (corpus / "3.txt").open("a") as file:
        file.write(" more")

    second = prepare(plan_of(corpus))

    assert second.train.parent != first.train.parent
    assert second.num_train + second.num_validation == 5 + first.num_train + first.num_validation
    assert contents(first) == before


def test_a_file_changed_within_its_size_is_noticed(corpus: Path) -> None:
    first = prepare(plan_of(corpus))
    text = (corpus / "5.txt").read_text()
    (corpus / "5.txt").write_text(text[::-1])

    assert prepare(plan_of(corpus)).train.parent != first.train.parent


def test_a_touched_file_is_hashed_again_and_found_unchanged(corpus: Path) -> None:
    first = prepare(plan_of(corpus))
    os.utime(corpus / "3.txt", (1, 1))

    second, seen = reads_of(plan_of(corpus))

    assert second == first
    assert seen == {"reading"}
    assert reads_of(plan_of(corpus))[1] == set()


def test_a_copy_elsewhere_is_the_same_entry(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "moved" / "deep")
    assert prepare(plan_of(tmp_path / "moved" / "deep")) == prepare(plan_of(corpus))


def test_names_tokenizer_and_fraction_are_part_of_the_key(corpus: Path) -> None:
    plans = [plan_of(corpus), plan_of(corpus, "bpe-300"), plan_of(corpus, fraction=0.3)]
    folders = [prepare(plan).train.parent for plan in plans]
    (corpus / "3.txt").rename(corpus / "3.txt2")  # in the same place of the order
    folders.append(prepare(plans[0]).train.parent)

    assert len(set(folders)) == 4


def test_a_damaged_entry_is_made_again(corpus: Path) -> None:
    first = prepare(plan_of(corpus, "bpe-300"))
    clean = contents(first)
    for name in ("train.bin", "tokenizer.json", "prepared.json"):
        (first.train.parent / name).unlink()
        assert contents(prepare(plan_of(corpus, "bpe-300"))) == clean
    first.validation.write_bytes(b"cut")
    assert contents(prepare(plan_of(corpus, "bpe-300"))) == clean


@pytest.mark.parametrize("index", ["", "{", "[]", '{"key": 3}', '{"key": "../.."}'])
def test_a_torn_index_is_no_error(corpus: Path, cache: Path, index: str) -> None:
    first = prepare(plan_of(corpus))
    for path in (cache / "index").glob("*.json"):
        path.write_text(index)

    assert prepare(plan_of(corpus)) == first


@pytest.mark.parametrize("phase", ["reading", "training tokenizer", "tokenizing"])
def test_after_a_kill_in_the_middle_the_result_is_that_of_a_clean_run(
    run: Run, corpus: Path, cache: Path, tmp_path: Path, phase: str
) -> None:
    plan = plan_of(corpus, "bpe-300")
    killed = run(
        "def kill(what, done, total):\n"
        f"    if what == {phase!r} and done * 2 > total: os.kill(os.getpid(), 9)\n"
        "prepare(plan, progress=kill)",
        plan,
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert not list((cache / "tokens").glob("*/*"))

    prepared, seen = reads_of(plan)

    assert "waiting for another process" not in seen
    assert contents(prepared) == contents(prepare(plan, cache=tmp_path / "clean"))
    assert list((cache / "making").iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_another_preparation(
    run: Run, corpus: Path, cache: Path
) -> None:
    killed = run(
        "prepare(plan, progress=lambda what, *_: what == 'tokenizing' and os.kill(os.getpid(), 9))",
        plan_of(corpus, "bpe-300"),
    )
    killed.wait(60)
    assert list((cache / "making").iterdir())

    prepare(plan_of(corpus, "bytes"))

    assert list((cache / "making").iterdir()) == []


def test_what_a_living_process_is_making_is_left_alone(
    run: Run, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    maker = run(
        "def pause(what, done, total):\n"
        f"    while what == 'tokenizing' and not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "prepare(plan, progress=pause)",
        plan_of(corpus, "bpe-300"),
    )
    wait_for(lambda: list((cache / "making").glob("*/*")))
    prepare(plan_of(corpus, "bytes"))
    flag.touch()

    assert maker.wait(60) == 0
    assert reads_of(plan_of(corpus, "bpe-300"))[1] == set()


def test_of_several_processes_at_once_one_prepares(run: Run, corpus: Path) -> None:
    code = (
        "seen = set()\n"
        "def note(what, done, total):\n"
        "    seen.add(what)\n"
        "    if what == 'tokenizing': time.sleep(0.3)\n"
        "made = prepare(plan, progress=note)\n"
        "print('reading' in seen, made.train, made.num_train)"
    )
    processes = [run(code, plan_of(corpus)) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]

    assert sorted(did for did, *_ in outputs) == ["False", "False", "True"]
    assert len({(path, count) for _, path, count in outputs}) == 1


def test_waiting_ends_with_an_error_that_names_the_holder(
    run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    flag = tmp_path / "go"
    holder = run(
        "def pause(what, done, total):\n"
        f"    while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "prepare(plan, progress=pause)",
        plan_of(corpus),
    )
    locks = cache / "index"
    wait_for(lambda: any(path.stat().st_size for path in locks.glob("*.lock")))
    monkeypatch.setattr(cache_module, "WAIT_S", 0.2)

    with pytest.raises(ColotrainError, match=f"process {holder.pid} on "):
        prepare(plan_of(corpus))

    flag.touch()
    assert holder.wait(60) == 0


def test_text_that_changes_while_it_is_read_is_an_error_and_leaves_no_entry(
    corpus: Path, cache: Path
) -> None:
    def change(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            (corpus / "0.txt").write_text(str(time.monotonic_ns()))

    with pytest.raises(ColotrainError, match="changed while"):
        prepare(plan_of(corpus), progress=change)

    assert not list((cache / "tokens").iterdir())
    assert prepare(plan_of(corpus)).num_train


def test_a_cache_that_cannot_be_written_says_what_to_set(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ColotrainError, match="COLOTRAIN_CACHE"):
        prepare(plan_of(corpus), cache=tmp_path / "file" / "cache")


def test_a_filesystem_without_locks_says_what_to_set(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ColotrainError, match=r"no file locks.*COLOTRAIN_CACHE"):
        prepare(plan_of(corpus))


@pytest.mark.parametrize(("mode", "left"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644)])
def test_tokens_are_read_by_nobody_who_could_not_read_the_text(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int, left: int
) -> None:
    cache.mkdir()
    cache.chmod(0o755)
    monkeypatch.setenv("COLOTRAIN_CACHE_SHARED", "1")
    sorted(corpus.iterdir())[3].chmod(mode)
    prepare(plan_of(corpus))
    [entry] = (cache / "tokens").iterdir()
    assert {path.stat().st_mode & 0o777 for path in entry.iterdir()} == {left}
    assert entry.stat().st_mode & 0o077 == {0o600: 0, 0o640: 0o050, 0o644: 0o055}[mode]


def test_equal_data_under_two_paths_is_prepared_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first, and takes nothing away from it."""
    import threading

    from colotrain.data.prepare import tokens

    twin = tmp_path / "twin"
    shutil.copytree(corpus, twin)
    writing, go_on, written = threading.Event(), threading.Event(), []
    write = tokens._write_entry

    def slowly(*arguments: Any) -> None:
        written.append(arguments[0])
        writing.set()
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(tokens, "_write_entry", slowly)
    found: list[Prepared] = []
    threads = [
        threading.Thread(target=lambda p=path: found.append(prepare(plan_of(p))))
        for path in (corpus, twin)
    ]
    threads[0].start()
    assert writing.wait(60)
    threads[1].start()
    time.sleep(0.3)  # it has found that there is no entry, or waits
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(written) == 1
    assert len(found) == 2


def test_prepared_is_what_can_be_opened_without_reading_it(
    corpus: Path, tmp_path: Path, cache: Path
) -> None:
    records = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(40)])
    tokens = tmp_path / "train.bin"
    tokens.write_bytes(bytes(1000))
    for plan in (plan_of(corpus), plan_of(records), plan_of(tokens)):
        assert not is_prepared(plan)
        prepare(plan)
        assert is_prepared(plan)
    parts = tuple(PartPlan(paths=(str(p),), weight=1.0) for p in (records, tmp_path / "other"))
    write_jsonl(tmp_path / "other", [{"text": f"row {i}"} for i in range(90, 99)])
    mixture = dataclasses.replace(
        plan_of(records), source="mixture", paths=(), mixture=parts, format="jsonl"
    )
    assert not is_prepared(mixture)
    prepare_all(mixture)
    assert is_prepared(mixture)
    with records.open("a") as file:
        file.write('{"text": "one more"}\n')
    assert not is_prepared(plan_of(records))
    shutil.rmtree(cache / "tokens")
    assert not is_prepared(plan_of(corpus))
