"""Data files that somebody changes while a run trains on them: nothing of it stays unsaid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.running import SMALL, Colotrain, Result

pytestmark = pytest.mark.timeout(1800)  # seconds, of a busy machine

CHANGES = """
import os, pathlib, signal

def grown(model, step):
    if step + 1 == 4 and not os.path.exists("planted"):
        pathlib.Path("planted").touch()
        with open("text.txt", "a") as file:
            file.write("and somebody adds more of it\\n" * 400)
        os.kill(os.getpid(), signal.SIGKILL)

def cut(model, step):
    if step + 1 == 4 and not os.path.exists("planted"):
        pathlib.Path("planted").touch()
        os.truncate("tokens.bin", 20_000)

def rewritten(model, step):
    if step + 1 == 2:
        with open("tokens.bin", "r+b") as file:
            file.write(b"zz" * 400)
"""


def run(colotrain: Colotrain, data: str, change: str, *settings: str) -> Result:
    (colotrain.cwd / "changes.py").write_text(CHANGES)
    how = [f"data.path={data}", "data.corpus=null", "data.tokenizer=bytes", "name=hurt"]
    how += ["plugin=zero1", "cluster.procs_per_node=1", "train.max_steps=6"]
    how += [
        f"train.on_gradients=changes:{change}",
        "elastic.memory_copy=1GiB",
        "checkpoint.every=2",
    ]
    return colotrain("run", *SMALL, *how, *settings, "--json")


def notes(colotrain: Colotrain) -> list[str]:
    return [str(e.fields["text"]) for e in colotrain.events("hurt") if e.kind == "note"]


@pytest.mark.slow
def test_data_that_grow_are_told_after_a_restart_from_memory(colotrain: Colotrain) -> None:
    (colotrain.cwd / "text.txt").write_text("a line of text to learn from\n" * 2000)
    result = run(colotrain, "text.txt", "grown")
    assert result.code == 0, result.err
    assert [e.fields.get("in_memory") for e in colotrain.events("hurt") if e.kind == "resumed"] == [
        True
    ]
    (told,) = [text for text in notes(colotrain) if "data files of another content" in text]
    assert told.startswith("warning: the copy in memory was made with data files of another")


def write_tokens(colotrain: Colotrain) -> None:
    (np.arange(200_000) % 251).astype("<u2").tofile(Path(colotrain.cwd, "tokens.bin"))


@pytest.mark.slow
def test_token_files_that_are_cut_are_suspected(colotrain: Colotrain) -> None:
    write_tokens(colotrain)
    result = run(colotrain, "tokens.bin", "cut")
    assert result.code == 0, result.err
    (cause,) = [e.fields["cause"] for e in colotrain.events("hurt") if e.kind == "restart"]
    assert "rank 0 was killed by SIGBUS (a file that it had mapped could not be reached" in cause
    assert any("data files of another content" in text for text in notes(colotrain))


@pytest.mark.slow
def test_token_files_that_change_in_place_are_told_with_a_save(colotrain: Colotrain) -> None:
    write_tokens(colotrain)
    result = run(colotrain, "tokens.bin", "rewritten")
    assert result.code == 0, result.err
    (told,) = [text for text in notes(colotrain) if "has changed while" in text]
    assert "tokens.bin has changed while the run reads it: the samples after step 2" in told
