"""Whatever others wrote into files, messages or names, a terminal follows nothing of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from colotrain.__main__ import print_bug
from colotrain.cli.main import guarded
from colotrain.engine.step.recording import record_failure
from colotrain.errors import ColotrainError, ConfigError, Problem, UsageError, shortened
from colotrain.events.log import EventWriter, read
from colotrain.rundir import RunDir
from colotrain.show.console import _Console, tell
from colotrain.spec.phases import Phase

EVIL = "a\x1b]0;evil\x07b\x1b[2Jc\x9b31md\x00e\u202ef\rg\x08h"
"""A title, a cleared screen, C1's sequence, a zero, text from right to left, overwriting."""


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


LONG = "begin " + "x" * 2_000_000 + " end"


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("mute")


def test_a_long_message_keeps_its_ends_and_says_how_much_is_left_out() -> None:
    assert shortened("short", 5) == "short"
    text = shortened(LONG, 100)
    assert text.startswith("begin xxx")
    assert text.endswith("xxx end")
    assert "[1,999,910 characters left out]" in text
    assert len(text) < 150


@pytest.mark.parametrize(
    "error",
    [
        ColotrainError(LONG, "mend it"),
        ColotrainError("short", LONG),
        ConfigError([Problem(key="a", value=1, expected=LONG)]),
    ],
)
def test_no_error_fills_a_screen(error: ColotrainError) -> None:
    (line,) = error.lines()
    assert 1000 < len(line) < 5000
    assert "characters left out" in line


def test_of_many_problems_the_first_are_shown_and_the_others_counted() -> None:
    error = ConfigError([Problem(key=f"k{n}", expected="less") for n in range(12_345)])
    assert error.lines()[-1] == "error: and 12,295 more"
    assert len(error.lines()) == 51
    assert len(str(error)) < 5000
    assert len(error.problems) == 12_345


def test_a_ranks_long_exception_is_whole_in_its_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rank00000-attempt0000.jsonl"
    with EventWriter(file) as events:
        assert record_failure(events, ValueError(LONG), Phase.COMPUTE, 3) != 0
        record_failure(events, Mute(), Phase.COMPUTE, 3)
        events.write_record("note", text=LONG)
    assert LONG in capsys.readouterr().err
    assert file.stat().st_size < 100_000
    long, mute, note = read(file)
    assert len(long.fields["error"]) < 3000
    assert long.fields["error"].startswith("ValueError: begin x")
    assert mute.fields["error"].startswith("Mute: its message cannot be shown: KeyError")
    assert len(note.fields["text"]) < 21_000


def test_a_bug_is_told_in_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError(EVIL + LONG)
    print_bug(type(error), error, None)
    said = capsys.readouterr().err
    assert len(said) < 21_000
    assert is_harmless(said)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_the_null_device_in_child_processes_too(closed: str) -> None:
    look = "import os; [os.fstat(number) for number in range(3)]"
    code = (
        "from colotrain.__main__ import open_closed_streams as o; o(); import subprocess, sys;"
        "print(sys.stdin.read(0)); sys.stderr.flush();"
        f"sys.exit(subprocess.call([sys.executable, '-c', '{look}']))"
    )
    command = f'exec {sys.executable} -c "$0" {closed}'
    done = subprocess.run(["sh", "-c", command, code], stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        ColotrainError(EVIL, EVIL),
        UsageError(f"{EVIL}\nerror: forged"),
        ConfigError([Problem(key=EVIL, value=EVIL, expected=EVIL, fix=EVIL)]),
    ],
)
def test_an_error_is_one_line_of_text(error: ColotrainError) -> None:
    (line,) = error.lines()
    assert is_harmless(line)
    assert "\n" not in line


def test_a_note_is_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    tell(EVIL + "\nforged")
    (line,) = capsys.readouterr().err.splitlines()
    assert is_harmless(line)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_prints_styles_of_its_own_alone(is_terminal: bool) -> None:
    file = io.StringIO()
    console = _Console(file=file, force_terminal=is_terminal, width=200, color_system="standard")
    table = Table(EVIL)
    table.add_row(EVIL, style="bold")
    with Live(table, console=console, auto_refresh=False) as live:
        live.update(Text(EVIL, style="red"), refresh=True)
    for part in (EVIL, Text(EVIL), table):
        console.print(part, style="yellow", markup=False)
    printed = file.getvalue()
    assert "]0;evil" in printed
    for sequence in ("\x1b]0;", "\x07", "\x1b[2J\x1b", "c\x1b", "\x9b", "\x00", "\u202e", "\x08"):
        assert sequence not in printed, repr(sequence)


@pytest.mark.parametrize(
    "words", [["resume"], ["export", "--to", "x"], ["plan", "--run"], ["stop"]]
)
def test_verbs_print_nothing_raw_of_a_hostile_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = RunDir("runs/mine")
    rundir.create()
    for plan in (f'{{"{EVIL}": 1}}', json.dumps({EVIL: EVIL}), json.dumps({"name": EVIL}), EVIL):
        rundir.plan_file.write_text(plan)
        verb, *more = words
        assert guarded([verb, *more, "mine"] if more != ["--to", "x"] else [verb, "mine", *more])
        guarded(["runs"])
        printed = capsys.readouterr()
        assert is_harmless(printed.err), printed.err
        assert is_harmless(printed.out), printed.out


def test_a_file_that_cannot_be_read_is_named_in_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guarded(["plan", f"recipe={tmp_path}/\x1b[2Jx.yaml"])
    assert is_harmless(capsys.readouterr().err)
    guarded(["--\x1b[2J"])
    assert is_harmless(capsys.readouterr().err)
