"""The files of a store that is a folder of this machine, with the methods of fsspec's drivers.

fsspec's own driver of local files follows links, so that whoever can write to the folder could have
any file of the user read or replaced. Here only regular files count, and no link is followed below
the store's folder, which may be a link itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain.rundir import (
    MOST_READ,
    folder_of,
    is_unfinished,
    make_folder,
    open_inside,
    replacement_of,
)

COPY_BYTES = 1 << 20


class LocalFiles:
    """The files below `folder`. Paths are absolute; others than those below it raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def invalidate_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """Return the regular files below a folder by path, without unfinished ones."""
        assert detail
        found = dict[str, dict[str, Any]]()
        for inner in self.ls(path, detail=True):
            if inner["type"] == "directory":
                with suppress(FileNotFoundError, PermissionError):
                    found |= self.find(inner["name"], detail=True)
            elif not is_unfinished(inner["name"].rpartition("/")[2]):
                found[inner["name"]] = inner
        return found

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:
        """Return the regular files and the folders in a folder."""
        assert detail
        found = []
        with folder_of(self._folder, Path(path) / "file") as (at, _), os.scandir(at) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
                        found.append(_info(f"{path}/{entry.name}", about))
        return found

    def info(self, path: str) -> dict[str, Any]:
        """Return what is known of a regular file or a folder."""
        with folder_of(self._folder, Path(path)) as (at, name):
            return _info(path, os.stat(name, dir_fd=at, follow_symlinks=False))

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        """Make a folder and those above it; others may read them as the umask permits."""
        assert exist_ok
        self._folder.mkdir(parents=True, exist_ok=True)
        if Path(path) != self._folder:
            make_folder(Path(path), inside=self._folder, private=False)

    def pipe_file(self, path: str, content: bytes) -> None:
        """Replace a file atomically."""
        with replacement_of(Path(path), inside=self._folder, private=False) as out:
            out.write(content)
        self._delete_unfinished(Path(path))

    def put_file(self, source: str, path: str) -> None:
        """Replace a file atomically by a copy of `source`, which is not of the store."""
        with (
            open(source, "rb") as content,
            replacement_of(Path(path), inside=self._folder, private=False) as out,
        ):
            shutil.copyfileobj(content, out, COPY_BYTES)
        self._delete_unfinished(Path(path))

    def cat_file(self, path: str, *, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of a file from `start` to `end`; `OSError` if it has too many."""
        first = start or 0
        with os.fdopen(open_inside(self._folder, path, os.O_RDONLY), "rb") as file:
            file.seek(first)
            content = file.read(MOST_READ + 1 if end is None else max(0, end - first))
        if end is None and len(content) > MOST_READ:
            raise OSError(errno.EFBIG, f"has more than {MOST_READ >> 20} MiB", path)
        return content

    def get_file(self, path: str, target: str) -> None:
        """Copy a file to `target`, which is not of the store."""
        with (
            os.fdopen(open_inside(self._folder, path, os.O_RDONLY), "rb") as content,
            open(target, "wb") as out,
        ):
            shutil.copyfileobj(content, out, COPY_BYTES)

    def rm_file(self, path: str) -> None:
        """Delete a file, unfinished ones that were to take its place, and a folder left empty."""
        with folder_of(self._folder, Path(path)) as (at, name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        self._delete_unfinished(Path(path))
        self._remove_folder(Path(path).parent)

    def _delete_unfinished(self, path: Path) -> None:
        """Delete what a sender that was killed has left of a file: a run has one at a time."""
        with folder_of(self._folder, path) as (at, name):
            for other in os.listdir(at):
                if is_unfinished(other, of=name):
                    with suppress(FileNotFoundError):
                        os.unlink(other, dir_fd=at)

    def _remove_folder(self, path: Path) -> None:
        """Delete an empty folder in that of a run: object stores have none either."""
        if self._folder not in (path, path.parent):
            with suppress(OSError), folder_of(self._folder, path) as (at, name):
                os.rmdir(name, dir_fd=at)


def _info(path: str, about: os.stat_result) -> dict[str, Any]:
    kind = "directory" if stat.S_ISDIR(about.st_mode) else "file"
    if kind == "file" and not stat.S_ISREG(about.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is no regular file", path)
    return {"name": path, "type": kind, "size": about.st_size, "mtime": about.st_mtime}
