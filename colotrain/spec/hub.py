"""Names of the Hugging Face Hub, and the folders of its cache. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(value: Any) -> bool:
    """Whether a setting names a repository of the Hub, and no file or folder from here."""
    is_text = isinstance(value, str) and NAME.fullmatch(value) is not None
    return is_text and not Path(value).exists() and not Path(value).parent.is_dir()


def hub_name(folder: str) -> str | None:
    """Name of the repository of which a folder of the Hub's cache holds a commit, if it is one."""
    repository, snapshots, commit = ("", "", "", *Path(folder).parts)[-3:]
    kind, *names = repository.split("--")
    return "/".join(names) if (kind, snapshots) == ("models", "snapshots") and commit else None
