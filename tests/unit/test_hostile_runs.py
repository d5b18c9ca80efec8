"""Each file of a run directory, in each form, before each verb that reads: an answer in time."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.engine.state.manifest import MANIFEST, SEAL, seal
from colotrain.events.kinds import LaunchEnded
from colotrain.events.log import EventWriter
from colotrain.export.job import write_json
from colotrain.export.receipt import READ, RECEIPT
from colotrain.rundir import RunDir
from tests.unit.events.test_view import plan_of, restarted_run, write_files
from tests.unit.runs.test_uploader import save

FILES = (
    *("plan.json", "config.yaml", "signature.json", "job.json", "summary.json", "launcher.json"),
    *("sweep.json", "samples.jsonl", "control/stop", "control/grads", "control/profile.json"),
    *("control/store.json", "control/heartbeats/rank00000.json", "logs/launcher.log"),
    *("events/launcher.jsonl", "events/rank00000-attempt0000.jsonl", "events/uploads.jsonl"),
    *(f"checkpoints/step-00000004/{MANIFEST}", "events", "logs", "checkpoints", "control"),
)
VERBS = (
    *(("runs",), ("runs", "--json"), ("logs", "mine"), ("checkpoints", "mine")),
    *(("dashboard", "mine", "--once"), ("inspect-grads", "mine"), ("plan", "--run", "mine")),
    *(("stop", "mine"), ("resume", "mine"), ("resume", "mine", "train.max_steps=3")),
    *(("export", "mine", "--to", "out"), ("plot", "mine", "--to", "out.svg"), ("profile", "mine")),
    ("plan", "recipe=runs/mine/config.yaml"),
)
LIMIT_S = 60
"""Seconds for a verb on a busy machine: what hangs, hangs for good."""
Form = Callable[[Path, random.Random], None]


class Late(BaseException):
    """No answer in time: no `except` of the code under test takes it for an error of a file."""


def fifo(path: Path, chance: random.Random) -> None:
    os.mkfifo(path)


def zeros(path: Path, chance: random.Random) -> None:
    path.symlink_to("/dev/zero")


def precious(path: Path, chance: random.Random) -> None:
    path.symlink_to(Path("precious").absolute())


def deep(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(("[", '{"a":')) * 200_000)


def huge(path: Path, chance: random.Random) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path: Path, chance: random.Random) -> None:
    path.mkdir()


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def junk(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(5000)))


def other(path: Path, chance: random.Random) -> None:
    document = chance.choice((None, 1, "x", [], {}, [{}], {"name": 1}, {"model": [1]}, [[]], 1e999))
    path.write_text(json.dumps(document))


FORMS = (fifo, zeros, precious, deep, huge, folder, empty, junk, other)
CASES = tuple(itertools.product(FILES, FORMS, VERBS))
"""2,772 cases: four minutes of one core."""
PARTS = 12


@contextmanager
def bounds() -> Iterator[None]:
    """End what hangs, and let what reads without end fail with `MemoryError`."""

    def late(number: int, frame: object) -> None:
        raise Late(f"no answer within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def put(place: Path, file: str, form: Form, chance: random.Random) -> None:
    """Make a run in which one file, or a torn copy of it, has another form."""
    rundir = RunDir(place / "mine")
    rundir.create()
    rundir.write_plan(plan_of())
    rundir.config_file.write_text("{}")
    write_files(rundir, restarted_run())
    save(rundir, 4)
    path = rundir.path / file
    if path.is_dir():
        path.rename(place / "aside")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    form(path, chance)


def check(where: Path, cases: list[tuple[str, Form, tuple[str, ...]]], seed: int) -> None:
    chance, wrong = random.Random(seed), list[str]()
    for number, (file, form, words) in enumerate(cases):
        place = where / str(number)
        (place / "runs").mkdir(parents=True)
        os.chdir(place)
        Path("precious").write_text("mine")
        put(place / "runs", file, form, chance)
        try:
            with bounds():
                code = guarded(list(words))
            assert code in (0, 1, 2, 75)
            assert Path("precious").read_text() == "mine"
        except BaseException as error:
            wrong.append(f"{file} as {form.__name__}, {' '.join(words)}: {error!r}"[:300])
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("colotrain.runs.listing.STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr("colotrain.runs.start.warm_up", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_some_forms_of_files_before_verbs(where: Path) -> None:
    quick = [case for case in CASES if case[2][0] in ("runs", "logs", "checkpoints", "stop")]
    check(where, random.Random(0).sample(quick, 60), seed=0)


LINKED = {
    "plan.json": ("runs", "--json"),
    "summary.json": ("runs", "--json"),
    "events/launcher.jsonl": ("dashboard", "mine", "--once"),
    "events": ("dashboard", "mine", "--once"),
    "logs/launcher.log": ("logs", "mine"),
    "logs": ("logs", "mine"),
}
"""File or folder that is a link to one elsewhere, and a verb that shows what it says."""


@pytest.mark.parametrize(("file", "words"), LINKED.items())
def test_what_a_link_in_a_run_leads_to_is_not_read(
    where: Path, file: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    put(where / "runs", "control/stop", empty, random.Random(0))
    rundir, secret = RunDir(where / "runs" / "mine"), "s3cret"
    end = LaunchEnded(status="failed", exit_code=1, cause=secret if "events" in file else "")
    EventWriter(rundir.launcher_events).write(end)
    if file == "summary.json":
        row = {"steps": 4, "loss": {"last": 1}, "validation_loss": 1, "tokens_per_s": 1}
        rundir.write_summary({**row, "unit": secret})
    if file == "plan.json":
        plan = json.loads(rundir.plan_file.read_text())
        plan["plugin"]["name"] = secret
        rundir.plan_file.write_text(json.dumps(plan))
    rundir.launcher_log.write_text(f"{secret}\n")
    os.utime(rundir.launcher_log, (2e10, 2e10))
    guarded([*words])
    assert secret in capsys.readouterr().out
    (rundir.path / file).rename(where / "elsewhere")
    (rundir.path / file).symlink_to(where / "elsewhere")
    guarded([*words])
    said = capsys.readouterr()
    assert secret not in said.out + said.err


@pytest.mark.parametrize("form", [fifo, zeros, deep, huge, empty, junk, other])
def test_a_receipt_of_any_form_is_one_line(
    where: Path, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    (where / "out").mkdir()
    form(where / "out" / RECEIPT, random.Random(1))
    with bounds():
        assert guarded(["export", "out", "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out: has no receipt.json that can be read")


@pytest.mark.parametrize("key", READ)
@pytest.mark.parametrize("value", [{"x": [1]}, [[["x"]]]])
def test_a_receipt_s_values_are_looked_at_before_they_are_used(
    where: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt: dict[str, Any] = {
        "run": {"path": "gone", "step": 1},
        **{"format": "own", "files": {}, "tokenizer": {}, "notes": [], "validation_loss": {}},
        **{"probe": {"input_ids": [[1]], "logits": []}, "outputs": {}},
    }
    section, _, name = key.rpartition(".")
    (receipt[section] if section else receipt)[name] = value
    (where / "out").mkdir()
    (where / "out" / "colotrain.json").write_text("{}")
    (where / "out" / RECEIPT).write_text(json.dumps(receipt))
    assert guarded(["export", "out", "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert key in line


def test_a_receipt_replaces_the_link_in_its_place(tmp_path: Path) -> None:
    for target in ("precious", "missing"):
        (tmp_path / "precious").write_text("mine")
        (tmp_path / RECEIPT).unlink(missing_ok=True)
        (tmp_path / RECEIPT).symlink_to(tmp_path / target)
        write_json(tmp_path / RECEIPT, {"a": 1})
        assert json.loads((tmp_path / RECEIPT).read_text()) == {"a": 1}
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "missing").exists()


HUGE = pytest.param(10**400, id="hundreds of digits")
SUMMARY = {
    **{"steps": 10, "loss": {"last": 1.0}, "validation_loss": 1.0, "tokens_per_s": 1.0},
    **{"restarts": 1, "goodput": {"lost_steps": 1, "share": 0.5}},
}


@pytest.mark.parametrize("value", [1.5, "x", {"x": 1}, [1], HUGE, 1e999])
@pytest.mark.parametrize("key", SUMMARY)
def test_a_summary_of_others_breaks_no_list_of_runs(where: Path, key: str, value: Any) -> None:
    put(where / "runs", "control/stop", empty, random.Random(0))
    rundir = RunDir(where / "runs" / "mine")
    EventWriter(rundir.launcher_events).write(LaunchEnded(status="finished", exit_code=0, cause=""))
    rundir.write_summary({**SUMMARY, key: value})
    assert guarded(["runs"]) == 0
    assert guarded(["runs", "--json"]) == 0


def test_a_manifest_with_a_number_of_hundreds_of_digits_is_damaged(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(where / "runs", "control/stop", empty, random.Random(0))
    path = where / "runs/mine/checkpoints/step-00000004" / MANIFEST
    for key in ("bytes", "world_size"):
        plain = json.loads(path.read_text())
        del plain[SEAL]
        (plain["files"]["a.distcp"] if key == "bytes" else plain)[key] = 10**400
        path.write_text(json.dumps({**plain, SEAL: seal(plain)}))
        assert guarded(["checkpoints", "mine"]) == 1
        assert "expected an integer" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_forms_of_files_before_all_verbs(where: Path, part: int) -> None:
    check(where, list(CASES[part::PARTS]), seed=part)


@pytest.mark.parametrize("words", [("checkpoints", "mine"), ("export", "mine", "--to", "out")])
@pytest.mark.parametrize("place", ["", "/step-00000004", f"/step-00000004/{MANIFEST}"])
def test_a_checkpoint_elsewhere_is_none_of_the_run(
    where: Path, place: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    put(where / "runs", "control/stop", empty, random.Random(0))
    path = where / f"runs/mine/checkpoints{place}"
    path.rename(where / "elsewhere")
    path.symlink_to(where / "elsewhere")
    assert guarded([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"runs/mine/checkpoints{place}: expected a file or a folder, no link" in line


def test_a_link_in_an_export_is_not_read(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (where / "out").mkdir()
    (where / "out" / "endless").symlink_to("/proc/self/pagemap")
    receipt = dict.fromkeys(("loss", "kind", "samples", "largest_difference"))
    sections = {"validation_loss": {"run": None, "export": None}, "outputs": receipt}
    sections |= {"probe": {"input_ids": [], "logits": []}, "run": {"path": "gone", "step": 1}}
    rest = {"format": "own", "files": {"endless": ""}, "tokenizer": {}, "notes": []}
    (where / "out" / RECEIPT).write_text(json.dumps({**sections, **rest}))
    with bounds():
        assert guarded(["export", "out", "--check"]) == 2
    assert "out/endless: is a link, which is not followed" in capsys.readouterr().err


def test_events_that_are_nested_deeply_or_endless_break_no_verb(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(where / "runs", "control/stop", empty, random.Random(0))
    long = dict.fromkeys(("step_s", "data_s", "optimizer_s"), 1e308)
    step = json.dumps({"t": 1.0, "kind": "step", "step": 1, "loss": 1.0, **long})
    deep_one = '{"t": 1, "kind": "step", "step": 1, "loss": "nan", "x": ' + "[" * 900 + "]" * 900
    with (where / "runs/mine/events/rank00000-attempt0000.jsonl").open("a") as file:
        file.write(f"{step}\n{deep_one}}}\n{step}\n")
    for words in (["runs"], ["logs", "mine"], ["dashboard", "mine", "--once"]):
        assert guarded(words) == 0, words
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "a\0", "a b"])
def test_a_sweep_names_runs_and_no_paths(
    where: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunDir(where / "runs" / "sw")
    one = {"sweep": "sw", "run": name, "overrides": [], "chosen": {}}
    folder.create()
    folder.write(folder.sweep_file, json.dumps({"elements": [one]}))
    assert guarded(["runs", "--sweep", "sw"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs/sw/sweep.json: damaged" in line
