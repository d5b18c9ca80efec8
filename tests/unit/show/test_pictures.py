"""The pictures in docs show what commands show today."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.pages import ROOT

FRAMES = Path(__file__).parents[1] / "golden" / "frames"
PICTURES = ROOT / "docs" / "pictures"
LABELS = r"^(?:[A-Za-z]+|peak memory|validation loss|time to first step|run directory)(?=  )"
HEADERS = r"^(?:plugin  .* micro .*|PARAMETER .*)$"


def lines(picture: Path) -> list[str]:
    """The text of each row of an SVG that rich wrote, with single blanks between its parts."""
    rows: dict[float, list[tuple[float, str]]] = {}
    tag = r'<text[^>]*?x="([\d.]+)"[^>]*?y="([\d.]+)"[^>]*>(.*?)</text>'
    for x, y, text in re.findall(tag, picture.read_text("utf-8")):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return [" ".join(text for _, text in sorted(row)) for _, row in sorted(rows.items())]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("picture", "frame"),
    [
        ("plan-80", "plan-80"),
        ("run-80", "run-end-80"),
        ("inspect-grads-80", "inspect-grads-80"),
    ],
)
def test_a_picture_has_the_rows_and_columns_of_today(picture: str, frame: str) -> None:
    golden = (FRAMES / f"{frame}.txt").read_text("utf-8")
    shown = [words(line) for line in lines(PICTURES / f"{picture}.svg")]
    for header in re.findall(HEADERS, golden, re.MULTILINE):
        assert words(header) in shown
    labels = re.findall(LABELS, golden, re.MULTILINE)
    assert len(labels) >= (1 if picture == "inspect-grads-80" else 8)
    for label in labels if picture != "inspect-grads-80" else ():
        assert any(line.startswith(label) for line in shown), label


def test_the_picture_of_the_dashboard_has_panes_of_today() -> None:
    pane = r"─ ([a-z][a-z ,×]+?) ─"
    golden = set(re.findall(pane, (FRAMES / "dashboard-80.txt").read_text("utf-8")))
    shown = lines(PICTURES / "dashboard-80.svg")
    shown = re.findall(pane, "\n".join(map(words, shown)))
    assert len(shown) >= 6
    assert set(shown) <= golden


def test_every_picture_is_shown() -> None:
    page = (ROOT / "docs" / "pictures.md").read_text("utf-8")
    for name in ("plan", "run", "inspect-grads", "dashboard"):
        assert f"(pictures/{name}-80.svg)" in page
