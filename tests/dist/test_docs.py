"""README.md and every page of docs/ can be followed; tests/following.py has the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.following import PROGRAMS, Follower, make_sample
from tests.pages import PAGES, blocks, words
from tests.representatives import half_of_the_day
from tests.running import Colotrain

PAGES_TO_FOLLOW = [
    page
    for page in PAGES
    if any(block.lines or (block.language == "python") for block in blocks(page))
    and page.name != "finetuning.md"  # test_finetuning_page.py follows it, and looks further
]
NEEDS = {
    **dict.fromkeys(("README.md", "data.md", "expert-parallel.md"), "transformers"),
    "pictures.md": "matplotlib",
}


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", half_of_the_day(PAGES_TO_FOLLOW), ids=lambda page: page.stem)
def test_a_page_can_be_followed(colotrain: Colotrain, page: Path, sample: Path) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    Follower(colotrain, page, sample).follow()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_line_has_a_rule(page: Path) -> None:
    lines = [line for block in blocks(page) for line in block.lines]
    assert [line for line in lines if words(line)[0] not in PROGRAMS] == []


def test_a_line_that_no_rule_covers_is_an_error(colotrain: Colotrain, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nsomething else\n```\n")
    with pytest.raises(AssertionError, match="no rule covers the line: something else"):
        Follower(colotrain, page, tmp_path).follow()
