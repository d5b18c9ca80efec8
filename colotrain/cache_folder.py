"""The folder of caches: prepared data, surveys of models, measurements, compiled code.

It is this user's alone: folders have the mode 0700 and files 0600, whatever the umask. What others
may have written there is not read but made anew. `COLOTRAIN_CACHE_SHARED=1` shares the folder with
those to whom its permissions give it. Standard library only.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain.errors import one_line
from colotrain.rundir import read_json, regular, write_atomically

SHARED = "COLOTRAIN_CACHE_SHARED"
OTHERS, OTHERS_WRITE = 0o077, 0o022
FIX = f"set COLOTRAIN_CACHE to a folder of your own, or {SHARED}=1 to share it with its users"


def cache_folder() -> Path:
    """Return `$COLOTRAIN_CACHE`, else `$XDG_CACHE_HOME/colotrain`, else `~/.cache/colotrain`."""
    if own := os.environ.get("COLOTRAIN_CACHE"):
        return _absolute(own)
    return _home_folder()


def _home_folder() -> Path:
    return _absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "colotrain"


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # the home is unknown
        raise FileNotFoundError(errno.ENOENT, str(error), path) from error


def is_shared() -> bool:
    return os.environ.get(SHARED, "") not in ("", "0")


def objection(about: os.stat_result) -> str:
    """Return why others may have written a file or folder; empty where they cannot."""
    if about.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    return "can be written by others" if about.st_mode & OTHERS_WRITE else ""


def read(folder: str, name: str) -> Any:
    """Return the JSON document in a cached file; `OSError` or `ValueError` where there is none."""
    return read_json(subfolder(folder, make=False) / name, open_own)


def write(folder: str, name: str, text: str) -> None:
    """Replace a cached file; a cache that cannot be written is no reason to fail."""
    with suppress(OSError):
        path = subfolder(folder) / name
        write_atomically(path, text)
        set_mode(path)


def subfolder(
    name: str, *, top: Path | None = None, make: bool = True, for_code: bool = False
) -> Path:
    """Return a folder in the cache `top` that, unless it is shared, only this user has written.

    Another one of this name is moved out of the way. Without `make` it may be missing. What is
    `for_code` is never shared.
    """
    top = top or usable_folder(for_code=for_code)
    path, shared = top / name, is_shared() and not for_code
    if make and not path.exists():
        if not top.exists():
            top.mkdir(0o700, parents=True, exist_ok=True)
            top.chmod(0o2770 if shared else 0o700)
        path.mkdir(0o700, exist_ok=True)
        set_mode(path, shared=None if shared else 0)
    if shared or not path.exists():
        return path
    if why := objection(about := path.stat()):
        unread = path.with_name(f"{name}.unread-{about.st_ino}")
        with suppress(FileNotFoundError):  # another process has moved it
            path.rename(unread)
        _say(f"{path} {why}: it is now {unread} (not read, can be deleted), and is made anew")
        return subfolder(name, top=top, make=make, for_code=for_code)
    set_mode(path, shared=0)
    return path


def usable_folder(named: Path | None = None, *, for_code: bool = False) -> Path:
    """Return the folder of caches, or the one in the home where that one is another user's.

    `PermissionError` where neither is usable.
    """
    named = named or cache_folder()
    if is_shared() and not for_code:
        return named
    if not (why := _take(named, may_change=not is_shared())):
        return named
    home = _home_folder()
    if home != named and not _take(home):
        _say(f"the cache {named} {why}: it is not read, {home} takes its place; {FIX}")
        return home
    raise PermissionError(errno.EACCES, f"{why}; {FIX}", str(named))


def _take(folder: Path, *, may_change: bool = True) -> str:
    """Let only this user write into a folder that is his; return an objection that remains.

    A folder whose files get its group (setgid) is shared on purpose, and stays as it is.
    """
    with suppress(FileNotFoundError):
        about = folder.stat()
        is_own = about.st_uid == os.geteuid() and not about.st_mode & stat.S_ISGID
        if may_change and is_own and about.st_mode & OTHERS_WRITE:
            folder.chmod(stat.S_IMODE(about.st_mode) & ~OTHERS_WRITE)
            if not (why := objection(folder.stat())):
                _say(f"others could write to the cache {folder}: they no longer can")
            return why
        return objection(about)
    return ""


def set_mode(path: Path, *, shared: int | None = None) -> None:
    """Let nobody else reach a file or folder of this user's, but those with whom a cache is shared.

    `shared` are their bits of a folder's mode, by default those of the folder around `path`.
    """
    about = path.stat()
    if about.st_uid != os.geteuid():
        return
    bits = shared_bits(path.parent) if shared is None else shared
    is_folder = stat.S_ISDIR(about.st_mode)
    mode = 0o700 | bits | about.st_mode & stat.S_ISGID if is_folder else 0o600 | bits & 0o666
    if stat.S_IMODE(about.st_mode) != mode:
        path.chmod(mode)


def shared_bits(folder: Path) -> int:
    """Return what group and others may do in a folder of a shared cache, as bits of its mode."""
    return folder.stat().st_mode & OTHERS if is_shared() else 0


def open_own(path: str | Path, flags: int) -> int:
    """Opener for `open`; `PermissionError` for a file that others may have written."""
    handle = regular(path, flags)
    if not is_shared() and (why := objection(os.fstat(handle))):
        os.close(handle)
        _say(f"{path} {why}: it is not read, and is made anew")
        raise PermissionError(errno.EACCES, why, str(path))
    return handle


def are_own(folder: Path) -> bool:
    """Whether only this user can have written a folder in the cache and the files in it."""
    if is_shared():
        return True
    with suppress(OSError):
        for path in (folder, *folder.iterdir()):
            if why := objection(path.stat()):
                _say(f"{path} {why}: {folder} is not read, and is made anew")
                return False
    return True


@functools.cache
def _say(text: str) -> None:
    """Print a line, once in this process."""
    print(one_line(f"warning: {text}"), file=sys.stderr, flush=True)
