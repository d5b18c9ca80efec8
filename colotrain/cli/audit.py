"""`colotrain audit`: run somebody's training script unchanged, and check its steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from colotrain.audit.checks import check
from colotrain.audit.command import ended_by, hidden_python, is_interrupt, new_rundir, run
from colotrain.audit.evidence import Evidence, evidence
from colotrain.audit.verdicts import CHECKS, Verdict
from colotrain.errors import UsageError
from colotrain.rundir import RunDir
from colotrain.show.console import print_json, stderr_console
from colotrain.show.formatting import clean
from colotrain.spec.exit_codes import DONE, FAILED, INTERRUPTED, NOT_CHECKED, UNVERIFIED

STYLES = {"ok": "green", "wrong": "bold red", "cannot tell": "yellow", "not checked": "bold yellow"}


def audit(command: Sequence[str], *, steps: int, name: str, strict: bool, as_json: bool) -> int:
    """Run the command to its end, and print a verdict for every check on stderr.

    The script's stdout stays as it is; with `as_json` it goes to stderr, and the document to
    stdout.
    """
    if not command:
        raise UsageError("audit: expected a command", "colotrain audit -- python train.py")
    if option := hidden_python(command):
        fix = "leave the option out: with it, Python ignores PYTHONPATH"
        raise UsageError(f"{command[0]} {option}: cannot be observed", fix)
    rundir = new_rundir(command, name)
    code = run(command, rundir, steps=steps, stdout=sys.stderr if as_json else None)
    found = evidence(rundir)
    verdicts = check(found)
    exit_code = exit_code_of(code, verdicts, strict=strict)
    if as_json:
        print_json(document(command, rundir, found, verdicts, code=code, exit_code=exit_code))
    else:
        show(rundir, found, verdicts, code=code)
    return exit_code


def exit_code_of(code: int, verdicts: Sequence[Verdict], *, strict: bool = False) -> int:
    outcomes = {verdict.outcome for verdict in verdicts}
    if is_interrupt(code):
        return INTERRUPTED
    if code != 0:
        return FAILED
    if "wrong" in outcomes or (outcomes != {"ok"} and strict):
        return UNVERIFIED
    return DONE if outcomes == {"ok"} else NOT_CHECKED


def document(
    command: Sequence[str],
    rundir: RunDir,
    found: Evidence,
    verdicts: Sequence[Verdict],
    *,
    code: int,
    exit_code: int,
) -> dict[str, Any]:
    """Return the document of `audit --json`."""
    return {
        "schema": 1,
        "command": list(command),
        "run": rundir.name,
        "command_exit_code": code,
        "exit_code": exit_code,
        "ranks": len(found.ranks),
        "world_size": found.world_size,
        "framework": found.first.process.framework if found.ranks else "",
        "steps": len(found.first.steps) if found.ranks else 0,
        "wrong": sum(verdict.outcome == "wrong" for verdict in verdicts),
        "not_checked": sum(verdict.outcome == "not checked" for verdict in verdicts),
        "checks": [asdict(verdict) for verdict in verdicts],
        "notes": notes(found),
    }


def notes(found: Evidence) -> list[str]:
    """Return what the observed processes remarked, each once."""
    kinds = ("failure", "skipped", "limit")
    texts = [remark.text for remark in found.remarks if remark.what in kinds]
    return list(dict.fromkeys([*found.failures, *texts]))


def show(rundir: RunDir, found: Evidence, verdicts: Sequence[Verdict], *, code: int) -> None:
    console = stderr_console()
    if found.ranks:
        console.print(_table(verdicts))
    else:
        console.print(f"no check could be made: {clean(described(verdicts[0]))}", soft_wrap=True)
    for note in notes(found):
        console.print(f"note: {clean(note)}", soft_wrap=True)
    if found.ranks:
        process = found.first.process
        of = f" of {found.world_size}" if found.world_size != len(found.ranks) else ""
        wrapped = f", {process.framework}" if process.framework else ""
        text = f"{process.model}{wrapped}: {len(found.first.steps)} steps on {len(found.ranks)}{of}"
        console.print(f"{clean(text)} ranks; gradients: colotrain inspect-grads {rundir.name}")
    if code != 0:
        console.print(f"error: {ended_by(code)}: its own error, not the audit's", soft_wrap=True)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("CHECK", "VERDICT", "WHY"):
        table.add_column(title, no_wrap=title != "WHY", overflow="fold")
    for verdict in verdicts:
        outcome = Text(verdict.outcome, STYLES[verdict.outcome])
        table.add_row(verdict.check, outcome, Text(clean(described(verdict))))
    return table


def described(verdict: Verdict) -> str:
    where = f" [{'; '.join(verdict.sites)}]" if verdict.sites else ""
    when = f" (step {verdict.step})" if verdict.step else ""
    meant = f"expected: {CHECKS[verdict.check]}; found: " if verdict.outcome == "wrong" else ""
    return f"{meant}{verdict.text}{when}{where}"
