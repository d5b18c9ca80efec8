"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colotrain.errors import UsageError

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings in Hydra's grammar: recipe=llm-tiny plugin=zero2 train.seed=1.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Force = Annotated[
    bool, typer.Option("--force", help="Run a plan even if it does not fit in memory.")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Read it with transformers, compare losses and logits, write receipt.json; "
        "exit code 4 where it differs. Also of a directory that is there.",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run code that is named in a run directory of another user."),
]
TrustPlan = Annotated[str | None, typer.Option("--trust-plan", metavar="SHA256", hidden=True)]
"""Digest of the plan that a command has checked, which it gives to what it starts."""
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="A run's name or folder; by default the newest.", show_default=False
    ),
]
RunsDir = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE", help="A store of runs, as s3://bucket/path.", show_default=False
    ),
]
Out = Annotated[str, typer.Option("--out", hidden=True)]
"""The same as `--to`, as some other tools spell it."""
Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="A run for every combination of values: optim.lr=1e-3,3e-4."),
]

Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="Try the setup: two short steps, the second resumed from a checkpoint.",
    ),
]

Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Rename an older run of that name to NAME.old-TIME."),
]


def written_to(to: str, out: str) -> str:
    """Return the value of `--to`, which may be spelled `--out`."""
    if to:
        refuse("--to", out=out)
    return to or out


def write_file(path: str, text: str) -> None:
    """Write a file that an option names; raises `UsageError` where that fails."""
    try:
        Path(path).write_text(text, "utf-8", newline="")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error})", "choose another file") from error


def refuse(beside: str, **options: object) -> None:
    """Raise `UsageError` if options were given that cannot be combined with `beside`."""
    given = [
        f"--{name}"
        for name, value in options.items()
        if value not in (None, "") and value is not False
    ]
    if given:
        problem = f"{', '.join(given)}: cannot be had beside {beside}"
        raise UsageError(problem, "leave one of them out")
