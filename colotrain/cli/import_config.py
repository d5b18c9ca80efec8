"""`colotrain import-config`: a recipe from the configuration of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from colotrain.errors import ConfigError, UsageError
from colotrain.records import as_argument, as_override
from colotrain.rundir import write_atomically
from colotrain.show.console import print_json, stdout_console
from colotrain.spec.hub import is_hub_name

if TYPE_CHECKING:
    from colotrain.migrate.findings import Finding

STYLES = {
    "taken": "green",
    "decided": "cyan",
    "asked": "magenta",
    "none": "yellow",
    "refused": "red",
    "unknown": "red",
}


def import_config(file: str, *, kind: str, to: str, as_json: bool) -> int:
    """Write the recipe that corresponds to `file`, and print what became of each key."""
    from colotrain.migrate import recipes

    source = Path(file).expanduser()
    config = recipes.load(source)
    if kind:
        recipes.check_kind(kind)
    kind = kind or recipes.recognise(config, source)
    found = recipes.findings(config, kind)
    recipes.check_trained(found)
    target = Path(to).expanduser() if to else Path("recipes") / f"{_stem(source)}.yaml"
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--to={to}: expected a .yaml file", "as in --to recipes/mine.yaml")
    if target.exists():
        raise UsageError(f"{target}: exists", "remove it, or name another file with --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, recipes.render(source, kind, found))
    settings = recipes.complete_settings(kind, found)
    # a name of the Hub is looked up, and downloaded, by the commands that need the model
    problems = [] if is_hub_name(settings.get("model.hf")) else _problems(target)
    if as_json:
        print_json(_document(kind, target, found, settings, problems))
    else:
        _print(kind, target, found, problems)
    return 0


def _stem(source: Path) -> str:
    """Return the file's name in a form that is valid for a recipe."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in source.stem)


def _problems(target: Path) -> list[str]:
    """Return the problems that keep the recipe from being a valid plan."""
    from colotrain.runs.resolving import plan_from

    try:
        plan_from([as_override("recipe", str(target))], here=False)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def _document(
    kind: str, target: Path, found: list[Finding], settings: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    from colotrain.migrate.recipes import questions

    return {
        "kind": kind,
        "recipe": str(target),
        "settings": settings,
        "keys": [
            {
                "key": finding.key,
                "value": finding.value,
                "outcome": finding.outcome,
                "to": finding.settings,
                "note": finding.note,
            }
            for finding in found
        ],
        "questions": questions(kind, found),
        "problems": problems,
    }


def _print(kind: str, target: Path, found: list[Finding], problems: list[str]) -> None:
    from colotrain.migrate.findings import MEANING
    from colotrain.migrate.recipes import missing_settings, question_about_model, questions

    console = stdout_console()
    table = Table(kind, "value", "", "here", box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    for finding in found:
        to = ", ".join(f"{key}={_plain(value)}" for key, value in finding.settings.items())
        here = "; ".join(part for part in (to, finding.note) if part)
        outcome = Text(MEANING[finding.outcome], style=STYLES[finding.outcome])
        table.add_row(finding.key, _plain(finding.value), outcome, here)
    if own := question_about_model(kind, found):
        table.add_row("model, data", "", Text(MEANING["asked"], style=STYLES["asked"]), own)
    console.print(table)
    counts = {name: sum(f.outcome == name for f in found) for name in MEANING}
    said = ", ".join(f"{count} {MEANING[name]}" for name, count in counts.items() if count)
    console.print(f"\n{len(found)} keys: {said}")
    for line in missing_settings(kind, found):
        console.print(line, soft_wrap=True)
    recipe = target.stem if target.parent == Path("recipes") else str(target)
    command = f"colotrain plan {as_argument('recipe', recipe)}"
    console.print(Text(f"{target} is written: {command}"), soft_wrap=True)
    for question in questions(kind, found):
        console.print(f"{MEANING['asked']}: {question}", style="yellow", soft_wrap=True)
    for problem in problems:
        console.print(f"warning: to be corrected first: {problem}", style="yellow", soft_wrap=True)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
