"""Errors for users: each says what is wrong, and what to do about it."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from colotrain.spec import exit_codes

MOST_PRINTED, MOST_OF_ERROR, MOST_WRITTEN = 4_000, 2_000, 20_000
"""Characters of a printed line, of one exception's message, and of a text in a run's events."""
MOST_PROBLEMS, MOST_COMPARED = 50, 200
"""Problems that are printed, and characters of a word to which a similar one is looked for."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The system lacks open files or memory for a moment: nothing is wrong with the file."""
MACHINE_FIXES = {
    errno.EMFILE: "allow more open files (`ulimit -n 4096`)",
    errno.ENFILE: "allow more open files (the sysctl fs.file-max)",
    errno.ENOMEM: "free memory",
    errno.EIO: "look at the disk, which fails (`dmesg`)",
    **dict.fromkeys(FULL, "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get access to it"),
}
"""What helps by the number of a system's error that says nothing about what a file holds."""


def shortened(text: str, most: int = MOST_PRINTED) -> str:
    """Return `text`; where it is long, its beginning, how much is left out, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    begin = most - end
    return f"{text[:begin]} [{len(text) - most:,} characters left out] {text[-end:]}"


def printable(text: str) -> str:
    """Return `text` as one line without control characters.

    Messages hold what others wrote: names in plans, workers' exceptions, answers of commands. A
    terminal would follow control sequences in them.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def one_line(text: str) -> str:
    """Return `text` as one line that can be printed, of bounded length."""
    return printable(shortened(text))


def message_of(error: BaseException) -> str:
    """Return what an exception says, of bounded length; a user's own may fail to say anything."""
    try:
        return shortened(str(error), MOST_OF_ERROR)
    except Exception as another:
        return f"its message cannot be shown: {type(another).__name__}"


def fix_of(error: BaseException, otherwise: str) -> str:
    """Return what helps where the machine is to blame for `error`, not the file; or `otherwise`.

    Libraries run out of memory also where a damaged file asks for endless memory. Those in Rust
    name the system's error in their text alone.
    """
    if isinstance(error, MemoryError):
        return f"free memory; if there is enough, {otherwise}"
    named = re.search(r"\(os error (\d+)\)", message_of(error))
    number = error.errno if isinstance(error, OSError) else int(named[1]) if named else None
    return MACHINE_FIXES.get(number or 0, otherwise)


class ColotrainError(Exception):
    """A failure that the user can act on: `problem` says what it is, `fix` what to do."""

    exit_code = exit_codes.FAILED

    def __init__(self, problem: str, fix: str = "") -> None:
        problem = shortened(problem)
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: errors also come from other processes."""
        return type(self), (self.problem, self.fix)

    def lines(self) -> list[str]:
        """Return the `error:` lines that a command prints on stderr."""
        return [one_line(f"error: {self}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error in the user's settings."""

    key: str
    expected: str
    value: Any = None
    fix: str = ""

    def __str__(self) -> str:
        shown = self.key if self.value is None else f"{self.key}={_as_written(self.value)}"
        line = f"{shown}: expected {self.expected}"
        return " ".join((f"{line}; {self.fix}" if self.fix else line).split())


def _as_written(value: Any) -> str:
    """Return `value` as written in YAML, shortened."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


class ConfigError(ColotrainError):
    """All errors of a configuration, reported at once (exit code 2)."""

    exit_code = exit_codes.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems[:MOST_PROBLEMS])))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)

    def lines(self) -> list[str]:
        lines = [one_line(f"error: {problem}") for problem in self.problems[:MOST_PROBLEMS]]
        more = len(self.problems) - MOST_PROBLEMS
        return [*lines, f"error: and {more:,} more"] if more > 0 else lines


class UsageError(ColotrainError):
    """A command that cannot be executed as given (exit code 2)."""

    exit_code = exit_codes.USAGE


class DoesNotFit(ColotrainError):
    """A plan that needs more memory than is available (exit code 3)."""

    exit_code = exit_codes.DOES_NOT_FIT


def of_system(error: BaseException | None) -> ColotrainError | None:
    """Return what the system refused as an error for the user; None where it is no such error.

    That is a file that the user named or the working directory, a full or broken disk, or a lack of
    open files, memory or processes.
    """
    if lacks_processes(error):
        problem = "no further process or thread may be started here"
        return ColotrainError(problem, "raise the limit (`ulimit -u`, or the container's)")
    if not isinstance(error, OSError):
        return None
    of_machine = error.errno in (*FULL, *NO_RESOURCES, errno.EIO)
    if error.filename is None and not of_machine:
        return None
    otherwise = "a disk" if error.errno in FULL else "this machine"
    name = " ".join(str(error.filename or otherwise).split())
    kind = ColotrainError if of_machine else UsageError
    fix = fix_of(error, "correct the path, or get access to it")
    return kind(f"{name}: {error.strerror}", fix)


def lacks_processes(error: BaseException | None) -> bool:
    """Whether a process or a thread could not be started, as under `ulimit -u`."""
    if isinstance(error, BlockingIOError):  # of fork; other causes have other texts
        return error.filename is None and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def suggest(word: str, known: Iterable[str], *, section: str = "") -> str:
    """Return a `did you mean` hint with the nearest names, or all known names, or nothing.

    `section` is put before each suggested name.
    """
    names = sorted(set(known))
    is_name = len(word) <= MOST_COMPARED
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5) if is_name else []
    if near:
        return "did you mean " + " or ".join(section + name for name in near) + "?"
    shown = [*names[:20], f"and {len(names) - 20} more"] if len(names) > 20 else names
    return "known: " + ", ".join(shown) if names else ""
