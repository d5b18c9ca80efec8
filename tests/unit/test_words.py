"""What people read has the field's words: no page, message, help or docstring has a private one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

INSTEAD = {
    r"in common|held alike": "shared",
    r"ledger": "memory breakdown",
    r"(un)?learned (tokens?|text)|tokens? (is|are) (un)?learned|nothing to learn": "train on",
    r"weigh|weighs|weighed|weighing": "weight, size, compare",
    r"settles?|settled|settling": "decide, correct, finish",
    r"houses?|bells?|guests?|passports?|remed(y|ies)|scenes?": "allocate, semaphore, rank, …",
    r"come to be|begins? anew|began anew|begun anew": "start, start over",
    r"without a word": "without a message",
    r"told apart": "distinguished, detected",
    r"runs part|parts? first": "differ",
}
"""Private word → what the field says."""
PRIVATE = re.compile("|".join(rf"\b({word})\b" for word in INSTEAD), re.IGNORECASE)


def found(text: str) -> list[str]:
    return [match[0] for match in PRIVATE.finditer(re.sub(r"`[^`\n]*`", "", text))]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_no_page_has_a_private_word(page: Path) -> None:
    assert found(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)) == []


def sentences(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the strings in a module that have several words: messages, docstrings."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "folder",
    sorted(p.name for p in (ROOT / "colotrain").iterdir() if p.is_dir() and p.name[0] != "_"),
)
def test_no_message_has_a_private_word(folder: str) -> None:
    texts = [
        (f"{file.relative_to(ROOT)}:{line}", words)
        for file in sorted((ROOT / "colotrain" / folder).rglob("*.py"))
        for line, text in sentences(file)
        if (words := found(text))
    ]
    assert texts == []


def test_private_words_are_found() -> None:
    assert found("What the groups weigh, held in common; the Ledger is settled.") == [
        "weigh",
        "in common",
        "Ledger",
        "settled",
    ]
    assert found("weights, weighted by a knowledgeable setting of learned positions") == []
