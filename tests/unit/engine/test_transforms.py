"""The order in which a model is built is the order of a list, and each row says what it follows."""

from __future__ import annotations

import pytest

from colotrain.engine.build.transforms import TRANSFORMS, Transform, in_order


def nothing(build: object) -> None:
    pass


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            Transform("early", nothing, after=frozenset({"shard"}), why="it reads shards"),
            "too early",
        ),
        (Transform("unexplained", nothing, after=frozenset({"freeze"})), "unexplained"),
        (Transform("freeze", nothing), "one name"),
    ],
)
def test_a_row_in_the_wrong_place_or_without_a_reason_is_found(row: Transform, says: str) -> None:
    first, other = TRANSFORMS[0], Transform("other", nothing)
    assert in_order(first, other) == (first, other)
    with pytest.raises(AssertionError, match=says):
        in_order(first, row)
