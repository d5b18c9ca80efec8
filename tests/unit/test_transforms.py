"""The order in which a model is built is the order of a list, and each row says what it follows."""

from __future__ import annotations

import pytest

from colotrain.engine.build.transforms import TRANSFORMS, Transform

NAMES = [transform.name for transform in TRANSFORMS]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=NAMES)
def test_what_comes_before_a_transform_is_named_with_its_reason(transform: Transform) -> None:
    before = transform.after.split(", ") if transform.after else []
    assert set(before) <= set(NAMES[: NAMES.index(transform.name)])
    assert bool(before) == bool(transform.why)


def test_names_are_given_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
