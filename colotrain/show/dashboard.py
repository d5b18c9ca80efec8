"""The dashboard: a pure function from a view of a run to a frame of text.

Panes are laid out for the given size: side by side where there is room, in one column on a narrow
terminal. A pane leaves out what it has no room for.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from colotrain.show import panes
from colotrain.show.frame import FOCI, Focus, FrameState
from colotrain.show.panes import Pane
from colotrain.show.symbols import ASCII

NARROW, WIDE = 72, 140
KEYS = "  ".join(f"{number} {focus}" for number, focus in enumerate(FOCI, 1)) + "  tab next"

Row = tuple[int, Sequence[tuple[int, str]]]
"""(share of the height, [(share of the width, title)])"""

_PANES: dict[str, Pane] = {
    "loss": panes.loss,
    "speed": panes.speed,
    "memory": panes.memory,
    "speed per rank": panes.ranks,
    "pipeline stages": panes.pipeline,
    "gradient norms, layer × time": panes.heat,
    "parameters to look at": panes.worst,
    "health": panes.health,
    "worker output": panes.output,
}
_LOSS, _SPEED, _MEMORY, _RANKS, _STAGES, _HEAT, _WORST, _HEALTH, _OUTPUT = _PANES

_LAYOUTS: dict[Focus, dict[str, list[Row]]] = {
    "overview": {
        "narrow": [(8, [(1, _LOSS)]), (7, [(1, _SPEED)]), (6, [(1, _MEMORY)]), (5, [(1, _HEALTH)])],
        "small": [
            (8, [(1, _LOSS), (1, _SPEED)]),
            (8, [(1, _HEAT), (1, _MEMORY)]),
            (6, [(1, _OUTPUT), (1, _HEALTH)]),
        ],
        "tall": [
            (9, [(1, _LOSS), (1, _SPEED)]),
            (8, [(1, _HEAT), (1, _MEMORY)]),
            (7, [(1, _WORST), (1, _RANKS)]),
            (7, [(1, _OUTPUT), (1, _HEALTH)]),
        ],
        "wide": [
            (9, [(5, _LOSS), (4, _SPEED), (4, _MEMORY)]),
            (10, [(5, _HEAT), (4, _WORST), (4, _RANKS)]),
            (7, [(9, _OUTPUT), (4, _HEALTH)]),
        ],
    },
    "gradients": {"": [(3, [(1, _HEAT)]), (2, [(1, _WORST)])]},
    "ranks": {"": [(1, [(1, _RANKS)]), (1, [(1, _MEMORY)])]},
    "output": {"": [(1, [(1, _HEALTH)]), (3, [(1, _OUTPUT)])]},
}


def render(
    frame: FrameState, *, width: int, height: int, focus: Focus = "overview", footer: str = ""
) -> RenderableType:
    """Return a frame of exactly `width` × `height`."""
    head = [_fitted(line, width) for line in panes.header(frame, width)]
    foot = [_fitted(Text(footer, "dim"), width)] if footer else []
    rows = _layout(focus, width, height)
    if focus == "ranks" and frame.plan.mesh.pp > 1:
        rows = [(1, [(1, _STAGES)]), *rows]
    room = max(3 * len(rows), height - len(head) - len(foot))
    heights = _shares(room, [share for share, _ in rows])
    body = [_row(frame, row, width, high) for (_, row), high in zip(rows, heights, strict=True)]
    return _Spelled(Group(*head, *body, *foot))


def _layout(focus: Focus, width: int, height: int) -> list[Row]:
    layouts = _LAYOUTS[focus]
    if len(layouts) == 1:
        return layouts[""]
    if width < NARROW:
        return layouts["narrow"]
    if width >= WIDE:
        return layouts["wide"]
    return layouts["tall" if height >= 34 else "small"]


def _row(
    frame: FrameState, row: Sequence[tuple[int, str]], width: int, height: int
) -> RenderableType:
    grid, cells = Table.grid(), []
    for (_, title), wide in zip(row, _shares(width, [share for share, _ in row]), strict=True):
        lines = _PANES[title](frame, max(1, wide - 4), max(1, height - 2))[: height - 2]
        inner = Group(*(_fitted(line, wide - 4) for line in lines))
        panel = Panel(inner, title=title, title_align="left", height=height, width=wide)
        panel.border_style = "dim"
        grid.add_column(width=wide)
        cells.append(panel)
    grid.add_row(*cells)
    return grid


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.no_wrap, line.overflow = True, "ellipsis"
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def _shares(total: int, shares: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to `shares`, without a remainder."""
    whole, done, out = sum(shares), 0, []
    for share in shares:
        start, done = total * done // whole, done + share
        out.append(total * done // whole - start)
    return out


class _Spelled:
    """Renders `inner` in ASCII if the output lacks Unicode."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            if options.ascii_only and not segment.control:
                yield Segment(segment.text.translate(ASCII), segment.style)
            else:
                yield segment
