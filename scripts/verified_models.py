"""Write the table of docs/models.md: `scripts/verified_models.py [--axes] [ARCHITECTURE…]`.

Each family is a tiny directory with random weights that transformers makes. It is trained under
every plugin on two ranks, and with mesh axes on four, compared with plain transformers in one
process, exported, and loaded again. With architectures only their rows are written anew, and with
--axes only the columns of mesh axes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from colotrain.errors import ConfigError  # noqa: E402
from colotrain.spec.plan import RunPlan  # noqa: E402
from tests.dist import plain  # noqa: E402
from tests.families import FAMILIES, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- Below: made by scripts/verified_models.py; do not edit. -->\n"
HEADER = (
    "| model | architecture | task | plugins | largest gradient difference | export "
    "| tp 2 | cp 2 | tp 2, cp 2 |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
AXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("mesh.tp=2",): ("zero1", "zero3", "gemini"),
    ("mesh.cp=2",): ("zero3",),
    ("mesh.tp=2", "mesh.cp=2"): ("zero3",),
}
"""Plugins with which each product of axes is trained on four ranks."""
TASKS = {
    "causal": "causal",
    "masked": "masked",
    "classes": "sequence classification",
    "token_classes": "token classification",
    "pairs": "sequence to sequence",
    "images": "image classification",
}


def row(family: Family) -> str:
    """The first columns of a row, from a verification."""
    with tempfile.TemporaryDirectory() as name:
        folder, cases = family.make(Path(name, "made")), Path(name, "cases")
        results = plain.compare(family, folder, cases)
        passed = [result.plugin for result in results if result.passed]
        for result in results:
            if not result.passed:
                print(f"{family.architecture}: {result.plugin}: {result.difference}")
        differences = list(plain.export_differences(family, folder, cases))
    largest = max(result.max_abs_gradient for result in results)
    what = TASKS[family.data] + (
        ", auxiliary loss" if "output_router_logits" in family.args else ""
    )
    exported = "same logits" if max(differences) <= 1e-5 else f"logits differ: {max(differences)}"
    plugins = "all five" if len(passed) == len(results) else ", ".join(passed) or "none"
    words = family.name, f"`{family.architecture}`", what, plugins, f"{largest:.0e}", exported
    return f"| {' | '.join(words)} |\n"


def with_axes(family: Family) -> list[str]:
    """For each combination of axes "same", or why it is refused."""
    cells: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, cases = family.make(Path(name, "made")), Path(name, "cases")
        plans: list[tuple[tuple[str, ...], RunPlan]] = []
        for axes, plugins in AXES.items():
            ranks = "cluster.procs_per_node=4"
            try:
                of_axes = [plain.plan_of(family, folder, p, ranks, *axes) for p in plugins]
                plans += [(axes, plan) for plan in of_axes]
            except ConfigError as error:
                cells[axes] = f"refused: {reason(error)}"
        results = plain.compare(family, folder, cases, [p for _, p in plans]) if plans else []
        for (axes, plan), result in zip(plans, results, strict=True):
            cells.setdefault(axes, "same")
            if not result.passed:
                print(f"{family.architecture}: {axes} {plan.plugin.name}: {result.difference}")
                cells[axes] = "differs"
    return [cells[axes] for axes in AXES]


def reason(error: ConfigError) -> str:
    """The reason in parentheses of the first problem, or that it is not known to divide."""
    _, _, rest = error.problems[0].expected.partition("(")
    return rest.rstrip(")") or "not known to divide samples"


def write(family: Family, *, only_axes: bool) -> None:
    """Put a row in its place in the table, which keeps the others."""
    text, _, table = PAGE.read_text("utf-8").partition(MARK)
    known = {tuple(row.split(" | ")[:2]): f"{row}\n" for row in table.splitlines()}
    cells = known[key_of(family)] if only_axes else row(family)
    first = [cell.strip() for cell in cells.strip().strip("|").split("|")][:6]
    known[key_of(family)] = f"| {' | '.join((*first, *with_axes(family)))} |\n"
    rows = "".join(known.get(key_of(each), "") for each in FAMILIES)
    PAGE.write_text(f"{text}{MARK}\n{HEADER}{rows}", "utf-8")


def key_of(family: Family) -> tuple[str, str]:
    return f"| {family.name}", f"`{family.architecture}`"


def main() -> None:
    named = [word for word in sys.argv[1:] if word != "--axes"]
    for family in FAMILIES:
        if not named or family.architecture in named:
            write(family, only_axes="--axes" in sys.argv)


if __name__ == "__main__":
    main()
