"""What the documentation shows to be run is run: the blocks after `<!-- run -->`, page by page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.dist.conftest import Colotrain

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(<!-- run -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "<!-- run -->" in page.read_text("utf-8")]


def test_there_are_such_pages() -> None:
    assert {"quick-start.md", "data.md"} <= {page.name for page in PAGES}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_in_their_order(colotrain: Colotrain, page: Path) -> None:
    """A block whose first line is a comment with a path (`# recipes/mine.yaml`) is that file."""
    for marked, language, body in BLOCK.findall(page.read_text("utf-8")):
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", body)
        if named:
            path = colotrain.cwd / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
        if not marked or language != "bash":
            continue
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["colotrain"]:
                result = colotrain(*words[1:])
                assert result.code == 0, f"{line}\n{result.out}\n{result.err}"
