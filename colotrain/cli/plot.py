"""`colotrain plot`: plots of one run, or of several in the same axes."""

from __future__ import annotations

from pathlib import Path

from colotrain.errors import ColotrainError, UsageError
from colotrain.events.liveness import find
from colotrain.rundir import RunDir
from colotrain.runs.naming import describe_differences
from colotrain.show.console import stderr_console
from colotrain.show.formatting import clean

ENDINGS = (".png", ".svg", ".pdf")
MOST_RUNS = 8


def plot(names: list[str], *, to: str) -> int:
    """Plot the runs (the newest if none are named) into the file `to`."""
    target = Path(to).expanduser()
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"--to={to}: expected a name that ends in {', '.join(ENDINGS)}")
    if len(names) > MOST_RUNS:
        raise UsageError(f"{len(names)} runs: expected at most {MOST_RUNS} in one picture")
    rundirs = [find(name) for name in names] or [find(None)]
    target.parent.mkdir(parents=True, exist_ok=True)
    save(rundirs, target)
    for line in describe_differences(rundirs):
        stderr_console().print(clean(line), soft_wrap=True)
    stderr_console().print(f"{target} is written", soft_wrap=True)
    return 0


def save(rundirs: list[RunDir], target: Path) -> None:
    """Write the plot; the error without matplotlib says how to install it."""
    from colotrain.show.plots import draw, read_curves

    curves = [read_curves(rundir) for rundir in rundirs]
    try:
        figure = draw(curves)
    except ImportError as error:
        problem = "pictures need the matplotlib package"
        raise ColotrainError(problem, "pip install 'colotrain[plot]'") from error
    figure.savefig(target, dpi=150)
