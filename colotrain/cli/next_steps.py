"""`colotrain` alone: what is in this folder, and which command comes next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colotrain.rundir import RUNS
from colotrain.runs.listing import newest_first, row_of
from colotrain.show.formatting import clean

NEXT = {
    "starting": "dashboard",
    "running": "dashboard",
    "finished": "dashboard",
    "preempted": "resume",
    "interrupted": "resume",
    "dead": "logs",
    "failed": "logs",
}
"""State of a run → the verb that is of use then."""
MOST_RECIPES = 5


def next_steps(recipes: Path = Path("recipes"), runs: Path = RUNS) -> Iterator[str]:
    """Yield a line for the newest run, one for the recipes here; how to begin where none is."""
    found = newest_first(runs)
    if found:
        row = row_of(found[0])
        steps = f" at step {row.steps} of {row.max_steps}" if row.steps is not None else ""
        verb = NEXT.get(row.state, "runs")
        name = f" {found[0].argument}" if verb != "runs" else ""
        yield f"newest run   {clean(row.name)}, {row.state}{steps}: `colotrain {verb}{name}`"
    names = sorted(file.stem for ending in ("yaml", "yml") for file in recipes.glob(f"*.{ending}"))
    if names:
        more = f" and {len(names) - MOST_RECIPES} more" if len(names) > MOST_RECIPES else ""
        shown = ", ".join(map(clean, names[:MOST_RECIPES])) + more
        yield f"recipes      {shown}: `colotrain plan recipe={clean(names[0])}`"
    if not found:
        yield "to try it    `colotrain run recipe=llm-tiny` trains a small model here in a minute"
    if not names:
        yield "your own     `colotrain new NAME model.hf=DIRECTORY data.path=FILE` writes a recipe"
