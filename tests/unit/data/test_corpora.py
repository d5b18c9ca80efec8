"""Which files a corpus has, how they are split, and how they are read."""

from __future__ import annotations

import os
import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from colotrain.data.prepare import corpora
from colotrain.data.prepare.corpora import (
    Span,
    is_validation,
    read_pieces,
    split,
    text_files,
)
from colotrain.data.prepare.sources import find_sources
from colotrain.errors import ConfigError
from colotrain.spec.plan import DataPlan


def find_files(plan: DataPlan) -> list[Path]:
    return [file.path for file in text_files(find_sources(plan).files)]


def plan_of(*paths: Path | str, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": tuple(map(str, paths)),
        "seq_len": 8,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.25,
    }
    return DataPlan(**{**settings, **changes})


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_standard_library_is_its_python_files_without_tests_and_installed_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    banned = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    relative = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    expected = sorted(name.as_posix() for name in relative if not banned & set(name.parts[:-1]))

    found = find_files(plan_of(source="corpus", corpus="stdlib"))

    assert [path.relative_to(root).as_posix() for path in found] == expected
    assert len(found) > 300


def test_a_folder_gives_its_text_files_sorted_and_leaves_out_hidden_and_binary_ones(
    tmp_path: Path,
) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".git/config", ".hidden"):
        write(tmp_path / name, name)
    write(tmp_path / "image.png", b"\x89PNG\0\0\0")
    write(tmp_path / "tokens.bin", "abcd")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")

    found = find_files(plan_of(tmp_path))

    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.txt", "a/z.md", "b.txt"]


def test_files_globs_and_folders_mix_and_no_file_comes_twice(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x/one.txt", "1"), write(tmp_path / "x/y/two.txt", "2")
    odd = write(tmp_path / "od[d].txt", "3")

    found = find_files(plan_of(odd, tmp_path / "**" / "*.txt", one, tmp_path / "x"))

    assert sorted(found) == sorted([one, two, odd])


def test_names_do_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    for home in ("here", "over/there"):
        write(tmp_path / home / "a/b.txt", "text")
    named = [find_sources(plan_of(tmp_path / home)).files for home in ("here", "over/there")]
    globbed = find_sources(plan_of(tmp_path / "here" / "*" / "*.txt")).files

    assert [file.name for files in (*named, globbed) for file in files] == ["a/b.txt"] * 3


def test_paths_are_looked_up_in_the_current_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "mine/a.txt", "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert [found.absolute() for found in find_files(plan_of("mine/a.txt"))] == [path]
    assert find_files(plan_of("~/mine")) == [path]


@pytest.mark.parametrize("name", ["nowhere", "nothing-*.txt", "empty", "image.png"])
def test_finding_nothing_names_the_key_the_value_and_a_fix(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "image.png", b"\0\1\2")

    with pytest.raises(ConfigError) as caught:
        find_files(plan_of(tmp_path / name))

    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.key == "data.path"
    assert str(tmp_path / name) in str(problem.value)
    assert problem.expected
    assert problem.fix


def test_a_folder_of_binary_files_only_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "one", b"\0one")
    write(tmp_path / "two", b"\0two")

    with pytest.raises(ConfigError, match="binary"):
        find_files(plan_of(tmp_path))


def test_the_split_by_file_keeps_about_the_fraction_and_grows_with_it() -> None:
    names = [f"{random.random()}/file{i}.txt" for i in range(4000)]
    small = {name for name in names if is_validation(name, 0.1)}
    large = {name for name in names if is_validation(name, 0.3)}

    assert 0.07 < len(small) / len(names) < 0.13
    assert small < large
    assert not any(is_validation(name, 0.0) for name in names)


def test_every_byte_is_in_exactly_one_split(tmp_path: Path) -> None:
    rng = random.Random()
    for i in range(rng.randint(1, 30)):
        write(tmp_path / f"{i}.txt", "".join(rng.choices("añ😀 \n", k=rng.randint(0, 400))))
    files = find_sources(plan_of(tmp_path)).files

    train, held = split(files, rng.choice([0.0, 0.05, 0.3, 0.9]))

    by_path: dict[Path, list[Span]] = {}
    for span in sorted([*train, *held], key=lambda span: span.start):
        by_path.setdefault(span.path, []).append(span)
    for file in files:
        spans = by_path.get(file.path, [])
        pieces = [file.path.read_bytes()[span.start : span.stop] for span in spans]
        assert b"".join(pieces) == file.path.read_bytes()
        assert sum(span.size_bytes for span in spans) == file.path.stat().st_size


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("line", ["short line\n", "é" * 5000 + "\n", "no line end at all 😀 "])
def test_a_single_file_is_cut_at_its_end_between_characters(
    tmp_path: Path, line: str, offset: int
) -> None:
    text = "." * offset + line * 20
    path = write(tmp_path / "only.txt", text)

    (train,), (held,) = split(find_sources(plan_of(path)).files, 0.25)

    front, back = "".join(read_pieces(train)), "".join(read_pieces(held))
    assert front + back == text
    assert 0.15 < held.size_bytes / path.stat().st_size <= 0.25
    assert front.endswith("\n") == line.endswith("\n")


def test_empty_files_do_not_make_a_split(tmp_path: Path) -> None:
    write(tmp_path / "text.txt", "line\n" * 100)
    for i in range(50):
        write(tmp_path / f"{i}.txt", "")

    train, held = split(find_sources(plan_of(tmp_path)).files, 0.25)

    assert [len(train), len(held)] == [1, 1]


def test_a_few_files_that_all_hash_to_one_side_are_cut_at_their_ends(tmp_path: Path) -> None:
    kept = [f"{i}.txt" for i in range(200) if not is_validation(f"{i}.txt", 0.1)][:3]
    for name in kept:
        write(tmp_path / name, "line\n" * 100)

    train, held = split(find_sources(plan_of(tmp_path)).files, 0.1)

    assert [len(train), len(held)] == [3, 3]


def test_pieces_are_the_text_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", 64)
    lines = ["".join(random.choices("abé😀\r\t ", k=random.randint(0, 15))) for _ in range(300)]
    text = "\n".join(lines) + "x" * 500
    path = write(tmp_path / "text", text)

    pieces = list(read_pieces(Span(path=path, start=0, stop=path.stat().st_size)))

    assert "".join(pieces) == text
    assert len(pieces) > 30
    assert all(piece.endswith("\n") for piece in pieces[:50])
    assert max(len(piece.encode()) for piece in pieces) < 4 * 64


def test_bytes_that_are_not_utf8_become_replacement_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", 7)
    content = os.urandom(2000)
    path = write(tmp_path / "noise", content)

    pieces = read_pieces(Span(path=path, start=0, stop=len(content)))

    assert "".join(pieces) == content.decode("utf-8", errors="replace")
