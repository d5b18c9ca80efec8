"""Plain data survives a checkpoint; anything else is refused, and nothing that is read runs."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from colotrain.engine.state.plain_state import decode, encode

VALUES: list[Any] = [
    None,
    True,
    3,
    -0.5,
    math.inf,
    "text",
    b"\x00\xff",
    1 + 2j,
    [1, [2.0, None]],
    (1, ("a",)),
    {1, 2},
    frozenset((1, 2)),
    {"a": 1, 2: {"b": ()}},
    OrderedDict(z=1, a=2),
    torch.bfloat16,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_comes_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_inside_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    found = decode(encode({"amax": [value]}))["amax"][0]
    assert found.dtype == dtype
    assert torch.equal(found, value)


def test_arrays_numbers_and_files_come_back() -> None:
    found = decode(encode([np.arange(3), np.float32(2.5), io.BytesIO(b"abc")]))
    assert np.array_equal(found[0], np.arange(3))
    assert found[1] == np.float32(2.5)
    assert found[2].getvalue() == b"abc"


@pytest.mark.parametrize("value", [print, {"a": [object()]}, torch.empty(1, device="meta")])
def test_what_is_not_plain_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="is a "):
        encode(value)


@pytest.mark.parametrize(
    "text", ['{"call":["os.system"]}', '{"dtype":"load"}', '{"tensor":"x"}', "{"]
)
def test_what_was_not_written_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
