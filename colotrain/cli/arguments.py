"""Arguments that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

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
    bool, typer.Option("--force", help="Run a plan that does not fit in memory all the same.")
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="A run's name or folder; by default the newest.", show_default=False
    ),
]
Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="A run for every combination of values: optim.lr=1e-3,3e-4."),
]
