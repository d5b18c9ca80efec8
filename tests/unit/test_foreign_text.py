"""Whatever others wrote into files, messages or names, a terminal follows nothing of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from colotrain.cli.main import guarded
from colotrain.errors import ColotrainError, ConfigError, Problem, UsageError
from colotrain.rundir import RunDir
from colotrain.show.console import _Console, tell

EVIL = "a\x1b]0;evil\x07b\x1b[2Jc\x9b31md\x00e\u202ef\rg\x08h"
"""A title, a cleared screen, C1's sequence, a zero, text from right to left, overwriting."""


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


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
