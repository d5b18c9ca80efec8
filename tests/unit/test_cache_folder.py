"""The folder of caches is this user's alone, unless it is shared on purpose."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colotrain import cache_folder
from colotrain.data.prepare.tokens import is_prepared, prepare
from colotrain.doctor import storage
from colotrain.doctor.finding import Environment
from colotrain.planner import measured_peaks
from colotrain.spec.plan import DataPlan

NOBODY, GROUP = 65534, 54321


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache_folder._say.cache_clear()
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(cache_folder.SHARED, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path: Path) -> DataPlan:
    return plan_of(tmp_path / "text.txt")


def plan_of(text: Path) -> DataPlan:
    text.write_text("one two three " * 50)
    return DataPlan(
        source="path",
        paths=(str(text),),
        seq_len=8,
        tokenizer="bytes",
        shuffle=True,
        validation_fraction=0.25,
    )


@contextmanager
def as_another_user(monkeypatch: pytest.MonkeyPatch, *made: Path) -> Iterator[None]:
    """What was made so far belongs to somebody who is neither root nor this user."""
    if os.geteuid() == 0:
        for path in made:
            os.chown(path, NOBODY, -1)
        yield
        return
    with monkeypatch.context() as patch:
        uid = os.geteuid()
        patch.setattr(os, "geteuid", lambda: uid + 1)
        yield


@contextmanager
def user(uid: int) -> Iterator[None]:
    """Act as another user of the group `GROUP`; root alone can."""
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([GROUP])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


@pytest.mark.parametrize("umask", [0o000, 0o027])
def test_a_cache_is_the_users_alone_whatever_the_umask(
    cache: Path, plan: DataPlan, umask: int
) -> None:
    before = os.umask(umask)
    try:
        prepare(plan)
        measured_peaks.remember("shape", 7)
    finally:
        os.umask(before)
    made = [cache, *cache.rglob("*")]
    assert {path.stat().st_mode & 0o7777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o7777 for path in made if path.is_file()} == {0o600}
    assert measured_peaks.recall("shape") == 7


@pytest.mark.parametrize("whose", ["folder", "file"])
def test_what_others_could_write_is_made_anew_and_said_in_a_line(
    cache: Path, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_peaks.remember("shape", 7)
    path = cache / "peaks" if whose == "folder" else cache / "peaks" / "shape.json"
    path.chmod(0o777)
    assert measured_peaks.recall("shape") is None
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"warning: {path} can be written by others" in said
    measured_peaks.remember("shape", 8)
    assert measured_peaks.recall("shape") == 8
    assert (cache / "peaks").stat().st_mode & 0o777 == 0o700


def test_tokens_that_others_could_write_are_made_anew(cache: Path, plan: DataPlan) -> None:
    train = prepare(plan).train
    content = train.read_bytes()
    train.write_bytes(content[::-1])
    train.chmod(0o666)
    assert not is_prepared(plan)
    assert prepare(plan).train.read_bytes() == content
    assert is_prepared(plan)


def test_a_file_of_another_user_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_peaks.remember("shape", 7)
    with as_another_user(monkeypatch, cache / "peaks" / "shape.json"):
        assert measured_peaks.recall("shape") is None


def test_the_folder_of_another_user_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir()
    with as_another_user(monkeypatch, cache):
        assert cache_folder.usable_folder() == tmp_path / "home" / "colotrain"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "colotrain"))
        cache.rename(tmp_path / "colotrain")
        with pytest.raises(PermissionError, match=r"another user; set COLOTRAIN_CACHE"):
            cache_folder.usable_folder()
    assert f"the cache {cache} belongs to another user: it is not read" in capsys.readouterr().err


def test_others_lose_the_right_to_write_into_ones_own_folder(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert cache_folder.usable_folder() == cache
    assert cache.stat().st_mode & 0o777 == 0o755


def test_a_cache_that_a_group_shares_stays_shared(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who forgets COLOTRAIN_CACHE_SHARED once does not take it from the others."""
    cache.mkdir()
    cache.chmod(0o2770)
    measured_peaks.remember("shape", 7)
    assert measured_peaks.recall("shape") == 7
    assert (tmp_path / "home" / "colotrain" / "peaks").is_dir()
    assert (cache.stat().st_mode & 0o7777, list(cache.iterdir())) == (0o2770, [])
    assert "COLOTRAIN_CACHE_SHARED=1 to share it" in capsys.readouterr().err


def test_the_doctor_says_that_others_can_write_to_the_cache(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    [finding] = storage.check_cache(Environment(runs=cache, cache=cache))
    assert finding.status == "warn"
    assert "can be written by others" in finding.text


def test_code_is_not_in_a_shared_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    cache.chmod(0o770)
    monkeypatch.setenv(cache_folder.SHARED, "1")
    assert cache_folder.usable_folder() == cache
    assert cache_folder.usable_folder(for_code=True) == tmp_path / "home" / "colotrain"
    assert cache.stat().st_mode & 0o777 == 0o770


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can act as two users")
def test_two_users_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp())  # unlike `tmp_path` for others, too
    try:
        folder.chmod(0o755)
        cache = folder / "cache"
        monkeypatch.setenv("COLOTRAIN_CACHE", str(cache))
        monkeypatch.setenv(cache_folder.SHARED, "1")
        plan, own = plan_of(folder / "text.txt"), plan_of(folder / "own.txt")
        (folder / "text.txt").chmod(0o644)
        os.chown(folder / "own.txt", NOBODY, NOBODY)
        (folder / "own.txt").chmod(0o600)
        cache.mkdir()
        os.chown(cache, -1, GROUP)
        cache.chmod(0o2770)
        with user(NOBODY):
            shared = prepare(plan).train
            private = prepare(own).train
            measured_peaks.remember("shape", 7)
        with user(NOBODY - 1):
            assert is_prepared(plan)
            assert prepare(plan).train.read_bytes() == shared.read_bytes()
            assert measured_peaks.recall("shape") == 7
            measured_peaks.remember("shape", 8)
            with pytest.raises(PermissionError):
                private.read_bytes()
            shared.unlink()
            assert prepare(plan).train.exists()
        with user(NOBODY):
            assert measured_peaks.recall("shape") == 8
            assert is_prepared(plan)
    finally:
        shutil.rmtree(folder)
