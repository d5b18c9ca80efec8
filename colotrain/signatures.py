"""Signatures of what this user wrote into a run directory, with a key that no run directory has.

The key is in the user's home. A directory can be moved and renamed, and its signatures stay valid;
what somebody else wrote, or changed, has none.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from colotrain.errors import one_line
from colotrain.rundir import RunDir, open_inside, read_json

KEY_BYTES = 32


def sign(rundir: RunDir, parts: Mapping[str, Any]) -> None:
    """Add signatures of parts of the run directory, such as its job; their content is plain data.

    If the home is not writable nothing is signed, and the parts will count as somebody else's: a
    line says so where that matters.
    """
    try:
        made = {part: signature(part, content) for part, content in parts.items()}
        rundir.write(rundir.signature_file, json.dumps(_read(rundir) | made) + "\n")
    except OSError as error:
        if any(content for part, content in parts.items() if part != "config"):
            why = f"the key in the home: {error.strerror or error}"
            _warn(f"{rundir.argument} is not signed ({why}); `resume` will ask for --trust-code")


def is_signed(rundir: RunDir, part: str, content: Any) -> bool:
    """Whether this user wrote this content of a part of the run directory."""
    return is_signature(str(_read(rundir).get(part)), part, content)


def is_signature(text: str, part: str, content: Any) -> bool:
    try:
        made = signature(part, content, make=False)
    except OSError:
        return False
    return hmac.compare_digest(text.encode(errors="replace"), made.encode())


def _read(rundir: RunDir) -> dict[str, Any]:
    try:
        found = read_json(rundir.signature_file, rundir.open)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def signature(part: str, content: Any, *, make: bool = True) -> str:
    """Return the signature of some content; `OSError` without a key, or where none can be made."""
    text = json.dumps([part, content], sort_keys=True)
    return hmac.new(_key(make=make), text.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return this user's key, created if missing; raise `OSError` if that is impossible."""
    path = key_file()
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):  # another process created one meanwhile
            os.link(temporary, path)
        temporary.unlink()
    try:
        return _read_key(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        _warn(f"{path}: {error.strerror}, so it is not used; move it away, and a new one is made")
        raise


def _read_key(path: Path) -> bytes:
    with open(path, "rb", opener=partial(open_inside, path.parent)) as file:
        about, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    problem = "is no key" if len(key) != KEY_BYTES else ""
    problem = "others can read or write it" if about.st_mode & 0o077 else problem
    problem = "belongs to another user" if about.st_uid != os.geteuid() else problem
    if problem:
        raise PermissionError(errno.EPERM, problem, str(path))
    return key


@cache
def _warn(text: str) -> None:
    """Print a warning once: each command looks at many signatures."""
    print(one_line(f"warning: {text}"), file=sys.stderr)


def key_file() -> Path:
    """Return `$XDG_STATE_HOME/colotrain/key`, else `~/.local/state/colotrain/key`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "colotrain" / "key"
    except RuntimeError as error:  # the home is unknown
        raise FileNotFoundError(str(error)) from error
