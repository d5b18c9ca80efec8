"""Which of the nodes that wait are in the next round, and in which order."""

from __future__ import annotations

from collections.abc import Sequence


def next_nodes(before: Sequence[int], waiting: Sequence[int], *, most: int) -> list[int]:
    """Return the nodes of the next round, of which the first has the first ranks.

    Nodes of the round `before` come first; others follow by their numbers, up to `most` nodes.
    Where there are as many as before, each keeps its place and new ones take the free places. So
    the ranks of those that stay keep their numbers, by which copies of their state in memory are
    found. Otherwise nodes are in the order of their numbers.
    """
    stay = [node for node in before if node in waiting]
    new = sorted(set(waiting) - set(stay))[: max(0, most - len(stay))]
    if len(stay) + len(new) != len(before):
        return sorted([*stay, *new])
    free = iter(new)
    return [node if node in stay else next(free) for node in before]
