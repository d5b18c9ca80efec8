"""For the site: links that lead out of docs/ become text, as what they name is not part of it."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """`[text](../README.md)` on a page at the top becomes `text`."""
    folder = posixpath.dirname(page.file.src_uri)

    def text_if_outside(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[1] if place.startswith("..") else match[0]

    return LINK.sub(text_if_outside, markdown)
