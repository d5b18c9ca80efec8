"""Commands of schedulers, each with a time limit. Their output is not trusted."""

from __future__ import annotations

import subprocess

from colotrain.errors import ColotrainError, UsageError

ASK_S = 20.0
"""Seconds in which a scheduler has to answer a question."""
SUBMIT_S = 120.0
"""Seconds in which it has to take a job."""


class NotInstalled(UsageError):
    """The scheduler's command is not on this machine."""


def run(
    words: list[str], *, label: str, text: str | None = None, timeout_s: float = ASK_S
) -> subprocess.CompletedProcess[str]:
    """Run a command; raise `ColotrainError` without an answer in time, `NotInstalled` without it.

    `label` is the scheduler's name in messages.
    """
    try:
        return subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            errors="replace",
        )
    except FileNotFoundError as error:
        fix = f"install it where you submit to {label} from; `--dry-run` prints the job"
        raise NotInstalled(f"{words[0]}: the command is not here", fix) from error
    except subprocess.TimeoutExpired as error:
        fix = f"is {label} reachable from here? try the command yourself"
        raise ColotrainError(f"{words[0]}: no answer within {timeout_s:.0f} s", fix) from error


def checked(done: subprocess.CompletedProcess[str], *, what: str, fix: str) -> str:
    """Return a command's output; raise `UsageError` with its last words if it failed."""
    if done.returncode:
        raise UsageError(f"{what}: {said(done)}", fix)
    return done.stdout


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said last, on one line."""
    lines = [" ".join(line.split()) for line in (done.stderr or done.stdout).splitlines()]
    kept = [line for line in lines if line][-3:]
    return "; ".join(kept)[:500] or f"exit code {done.returncode}"
