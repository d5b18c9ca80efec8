"""Sweeps: a run for every combination of comma-separated values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from colotrain.errors import ColotrainError, ConfigError, Problem, UsageError, suggest
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RUNS, RunDir, read_json, run_name
from colotrain.spec.exit_codes import DONE, STOPPED, WORST_FIRST

MOST_ELEMENTS = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One run of a sweep."""

    sweep: str
    run: str
    overrides: list[str]
    chosen: dict[str, str]
    """Settings that differ from the other runs': key → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Content of a sweep's file in its folder."""

    elements: tuple[Element, ...]


def elements_of(overrides: list[str]) -> list[Element]:
    """Return the runs of a sweep, called NAME-0, NAME-1, …; raise `ConfigError` or `UsageError`."""
    from colotrain.config.compose import combinations

    found = combinations(overrides)
    if len(found) > MOST_ELEMENTS:
        fix = "give fewer values"
        raise UsageError(f"--sweep: {len(found)} runs, more than {MOST_ELEMENTS}", fix)
    names = {o.partition("=")[2] for o in overrides if o.startswith("name=")}
    name = run_name(names.pop() if names else f"sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    width = len(str(len(found) - 1))
    return [
        Element(
            sweep=name,
            run=f"{name}-{index:0{width}d}",
            overrides=[*combination, f"name={name}-{index:0{width}d}"],
            chosen=dict(o.split("=", 1) for o in combination if o not in overrides),
        )
        for index, combination in enumerate(found)
    ]


def of_each(elements: Sequence[Element], look: Callable[[Element], T]) -> list[T]:
    """Return what `look` returns for each element; raise the errors of all."""
    found: list[T] = []
    having: dict[str, list[Element]] = {}
    problems: dict[str, Problem] = {}
    for element in elements:
        try:
            found.append(look(element))
        except ConfigError as error:
            for problem in error.problems:
                problems[str(problem)] = problem
                having.setdefault(str(problem), []).append(element)
        except ColotrainError as error:
            raise type(error)(_with(element.chosen.items()) + error.problem, error.fix) from error
    if problems:
        raise ConfigError(
            [
                replace(problem, key=_with(chosen) + problem.key)
                for text, problem in problems.items()
                for chosen in _what_have(having[text], elements)
            ]
        )
    return found


def _what_have(some: list[Element], elements: Sequence[Element]) -> list[list[tuple[str, str]]]:
    """Return the choices that `some` of all elements have alone, or each one's whole choice."""
    every = [list(element.chosen.items()) for element in some]
    common = [item for item in every[0] if all(item in chosen for chosen in every)]
    alike = [e for e in elements if all(item in e.chosen.items() for item in common)]
    return [common] if alike == some else every


def _with(chosen: Iterable[tuple[str, str]]) -> str:
    text = " ".join(f"{key}={value}" for key, value in chosen)
    return f"with {text}: " if text else ""


def write_sweep(folder: RunDir, elements: list[Element]) -> None:
    folder.create()
    text = json.dumps(to_plain(Sweep(elements=tuple(elements))), indent=2)
    folder.write(folder.sweep_file, text + "\n")


def find_sweep(name: str, *, root: Path = RUNS) -> list[Element]:
    """Return the elements of a sweep under `root`; raise `UsageError` if there is none."""
    folder = RunDir(root / name)
    try:
        document = read_json(folder.sweep_file, folder.open)
        elements = from_plain(Sweep, document).elements
        if strange := [each.run for each in elements if each.run != run_name(each.run)]:
            raise ValueError(f"{strange[0]!r} is no name of a run")
        return list(elements)
    except OSError as error:
        known = (path.parent.name for path in root.glob(f"*/{folder.sweep_file.name}"))
        raise UsageError(f"no sweep {name!r}", suggest(name, known)) from error
    except (ValueError, ConfigError) as error:
        raise UsageError(f"{folder.sweep_file}: damaged ({error})", "look at the runs") from error


def run_sweep(overrides: list[str], *, as_json: bool, force: bool, overwrite: bool = False) -> int:
    """Train the runs of a sweep here in turn; a failed run does not end the sweep.

    Returns 1 if a run failed; a stop ends the sweep with the exit code of the stopped run.
    """
    from colotrain.runs.checkpoints import check_named
    from colotrain.runs.naming import check_name
    from colotrain.runs.resolving import resolve_config
    from colotrain.runs.start import run
    from colotrain.show.console import print_json

    def look(element: Element) -> None:
        made = resolve_config(element.overrides)
        rundir = RunDir(RUNS / made.plan.name)
        if not overwrite:
            check_name(rundir, made.plan, made.config)
        check_named(made.plan, rundir, overwrite=overwrite)

    elements = elements_of(overrides)
    of_each(elements, look)  # before the first one runs
    write_sweep(RunDir(RUNS / elements[0].sweep), elements)
    codes: dict[str, int] = {}
    for element in elements:
        try:
            codes[element.run] = run(
                element.overrides, as_json=False, force=force, overwrite=overwrite
            )
        except ColotrainError as error:
            _say(f"{element.run}: {error}")
            codes[element.run] = error.exit_code
        if codes[element.run] in STOPPED:
            break
    if as_json:
        print_json({"sweep": elements[0].sweep, "runs": table(elements), "exit_codes": codes})
    else:
        print_sweep(elements[0].sweep, as_json=False)
    return next((code for code in WORST_FIRST if code in codes.values()), DONE)


def _say(text: str) -> None:
    from colotrain.show.console import tell

    tell(f"error: {text}")


def table(elements: list[Element], *, root: Path = RUNS) -> list[dict[str, Any]]:
    """Return each element with its settings and progress, the lowest loss first.

    The validation loss is used where there is one.
    """
    from colotrain.runs.listing import rows_of

    rows = rows_of([RunDir(root / element.run) for element in elements])
    found = [
        {"run": element.run, "chosen": element.chosen} | to_plain(row)
        for element, row in zip(elements, rows, strict=True)
    ]
    return sorted(found, key=_rank)


def _rank(row: dict[str, Any]) -> tuple[float, str]:
    loss = row["loss"] if row["validation_loss"] is None else row["validation_loss"]
    known = isinstance(loss, float) and math.isfinite(loss)
    return (loss if known else math.inf), row["run"]


def print_sweep(name: str, *, as_json: bool, root: Path = RUNS) -> int:
    """Print the results of a sweep (`colotrain runs --sweep NAME`)."""
    from rich.table import Table

    from colotrain.runs.listing import speed
    from colotrain.show.console import print_json, stdout_console
    from colotrain.show.formatting import clean, shown, shown_loss

    rows = table(find_sweep(name, root=root), root=root)
    if as_json:
        print_json({"sweep": name, "runs": rows})
        return 0
    keys = list(dict.fromkeys(key for row in rows for key in row["chosen"]))
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("RUN", "STATE", *keys, "STEP", "LOSS", "VAL", "SPEED"):
        grid.add_column(clean(title), overflow="fold")
    for row in rows:
        grid.add_row(
            clean(row["run"]),
            _state(row),
            *(clean(row["chosen"].get(key, "-")) for key in keys),
            f"{shown(row['steps'], 'd')}/{shown(row['max_steps'], 'd')}",
            shown_loss(row["loss"]),
            shown_loss(row["validation_loss"]),
            speed(row["tokens_per_s"], row["unit"]),
        )
    stdout_console().print(grid)
    return 0


def _state(row: dict[str, Any]) -> str:
    job = row.get("job_state")
    return f"{row['state']} ({job})" if job else str(row["state"])
