"""What README.md and the pages of docs/ show: their blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.name != "journal.md"]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    body: str

    @property
    def path(self) -> str:
        """The file that it is, where its first line says so: `# recipes/mine.yaml`."""
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.body)
        return named[1] if named else ""

    @property
    def lines(self) -> list[str]:
        """What it has a shell do, without comments and empty lines."""
        if self.language != "bash":
            return []
        text = self.body.replace("\\\n", " ")
        return [line for line in text.splitlines() if shlex.split(line, comments=True)]


def blocks(page: Path) -> list[Block]:
    return [Block(page, language, body) for language, body in _FENCE.findall(page.read_text())]


def code_in_text(page: Path) -> list[str]:
    """What stands in backquotes outside of blocks."""
    return _CODE.findall(_FENCE.sub("", page.read_text("utf-8")))


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `colotrain` in the blocks of a page, `make run ARGS=…` included."""
    for block in blocks(page):
        for line in block.lines:
            first, *rest = words(line)
            if first == "colotrain":
                yield rest
            elif [first, *rest[:1]] == ["make", "run"]:
                given = [w.removeprefix("ARGS=") for w in rest if w.startswith("ARGS=")]
                yield ["run", *" ".join(given).split()]
