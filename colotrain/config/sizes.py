"""Sizes as users write them: bytes, `512MiB`, `1.5GB`, or a fraction of the available bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from colotrain.errors import Problem

Size = int | float | str
"""Bytes (`1048576`), text (`512MiB`, `10GiB`), or a fraction of the available bytes (`0.5`)."""
UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
FORM = "bytes, a size like 512MiB or 10GB, or a fraction like 0.5"
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_size(value: float | str, *, whole: int | None = None) -> int:
    """Return the bytes of `value`; a decimal fraction up to `1.0` is a share of `whole`.

    Raises `ValueError` with a description of valid sizes.
    """
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None:
        raise ValueError(FORM)
    number, unit = float(match["number"]), match["unit"].lower()
    if unit and unit not in UNITS:
        raise ValueError(FORM)
    is_share = not unit and "." in match["number"] and number <= 1
    if is_share and whole is None:
        raise ValueError("bytes, or a size like 512MiB or 10GB")
    num_bytes = int(number * whole) if is_share and whole else int(number * UNITS[unit or "b"])
    if num_bytes < 1:
        raise ValueError("a size above zero")
    return num_bytes


def check_size(key: str, value: float | str, whole: int) -> Iterator[Problem]:
    try:
        parse_size(value, whole=whole)
    except ValueError as error:
        yield Problem(key=key, value=value, expected=f"auto, {error}", fix=f"as in {key}=512MiB")
