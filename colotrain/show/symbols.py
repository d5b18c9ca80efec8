"""Symbols of charts and tables, and what stands for them on outputs without Unicode."""

from __future__ import annotations

import codecs

ASCII = str.maketrans("▁▂▃▄▅▆▇█▏◆·…→×│–─", "._-:=+*#|@.~>x|--")
TO_ASCII = "colotrain.to_ascii"
"""Name of the error handler that writes what an encoding lacks in ASCII, or as `?`."""


def to_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace the characters that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII)
    return "".join(c if c.isascii() else "?" for c in text), error.end


codecs.register_error(TO_ASCII, to_ascii)
