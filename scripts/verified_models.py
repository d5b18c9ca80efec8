"""Write the table of docs/models.md: `python scripts/verified_models.py [ARCHITECTURE…]`.

Each family is a tiny directory with random weights that transformers makes. It is trained under
every plugin on two ranks, compared with plain transformers in one process, exported, and loaded
again. With architectures only their rows are written anew.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist import plain  # noqa: E402
from tests.families import FAMILIES, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- Below: made by scripts/verified_models.py; do not edit. -->\n"
HEADER = (
    "| model | architecture | task | plugins | largest gradient difference | export |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)
TASKS = {
    "causal": "causal",
    "masked": "masked",
    "classes": "sequence classification",
    "token_classes": "token classification",
    "pairs": "sequence to sequence",
    "images": "image classification",
}


def row(family: Family) -> str:
    """A row of the table, from a verification."""
    with tempfile.TemporaryDirectory() as name:
        folder, cases = family.make(Path(name, "made")), Path(name, "cases")
        results = plain.compare(family, folder, cases)
        passed = [result.plugin for result in results if result.passed]
        for result in results:
            if not result.passed:
                print(f"{family.architecture}: {result.plugin}: {result.difference}")
        differences = list(plain.export_differences(family, folder, cases))
    largest = max(result.max_abs_gradient for result in results)
    what = TASKS[family.data] + (", auxiliary loss" if family.args else "")
    exported = "same logits" if max(differences) <= 1e-5 else f"logits differ: {max(differences)}"
    plugins = "all five" if len(passed) == len(results) else ", ".join(passed) or "none"
    words = family.name, f"`{family.architecture}`", what, plugins, f"{largest:.0e}", exported
    return f"| {' | '.join(words)} |\n"


def write(family: Family, line: str) -> None:
    """Put a row in its place in the table, which keeps the others."""
    text, _, table = PAGE.read_text("utf-8").partition(MARK)
    known = {tuple(row.split(" | ")[:2]): f"{row}\n" for row in table.splitlines()}
    known[key_of(family)] = line
    rows = "".join(known.get(key_of(each), "") for each in FAMILIES)
    PAGE.write_text(f"{text}{MARK}\n{HEADER}{rows}", "utf-8")


def key_of(family: Family) -> tuple[str, str]:
    return f"| {family.name}", f"`{family.architecture}`"


def main() -> None:
    for family in FAMILIES:
        if not sys.argv[1:] or family.architecture in sys.argv[1:]:
            write(family, row(family))


if __name__ == "__main__":
    main()
