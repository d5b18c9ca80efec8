"""Access to the objects under one address of a store, such as S3, through fsspec, with retries.

fsspec's drivers read credentials from the environment. An error message has only the type and the
code of the driver's error, whose text may hold a secret.

fsspec's own driver of local files follows links, so that whoever can write to the folder could have
any file of the user read or replaced. `LocalFiles` stands in for it.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from colotrain.config.stores import run_address
from colotrain.errors import ColotrainError, UsageError
from colotrain.rundir import (
    MOST_READ,
    folder_of,
    is_unfinished,
    make_folder,
    open_inside,
    replacement_of,
)

T = TypeVar("T")
ATTEMPTS = 5
COPY_BYTES = 1 << 20
PAUSE_S = 0.5
"""Seconds before the second attempt; they double with each further one."""
LONGEST_PAUSE_S = 15.0
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 2
"""Parts of one file that are sent at once, and held in memory; so are those of other files."""
FILES_AT_ONCE = 4
MOST_PARTS = 9000
"""S3 takes 10,000 parts of a file."""
FINAL = (FileNotFoundError, PermissionError)
"""Errors that a further attempt does not mend."""
STRANGE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
"""Errors of a local store in which a link, a FIFO or a device stands for a file or a folder."""
FINAL_CODES = (errno.EROFS, errno.EFBIG, *STRANGE)
"""Codes of errors of this machine that a further attempt does not mend."""
FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")
GROWING = (".jsonl", ".log")
"""Endings of files that may grow while they are sent."""
WITH_FOLDERS = ("file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs")
"""Protocols that need folders made first. Elsewhere, makedirs would create a misspelt bucket."""
EXTRAS = ("s3", "s3a")
"""Protocols of the extra `colotrain[store]`."""
TOKENS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
"""What stores call a value that changes with an object's content."""
WRITTEN = ("LastModified", "last_modified", "updated", "mtime", "created")
"""What stores call the time at which an object was written."""


class StoreError(ColotrainError):
    """The store did not do what was asked, also after further attempts."""

    final = False
    """Whether no further attempt can help before the user has changed something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object."""

    bytes: int
    token: str
    """Opaque value, equal only for the same content as written by the same operation."""
    modified_at: float
    """Unix time at which it was written; 0 if the store does not tell."""


class Store:
    """The objects of a store of runs, such as `s3://bucket/path`, or of its run `name`.

    Thread-safe. Of a store on this machine's disk, links below `runs_dir` are not followed.
    """

    def __init__(self, runs_dir: str, name: str = "", *, attempts: int = ATTEMPTS) -> None:
        self.address = run_address(runs_dir, name) if name else runs_dir.rstrip("/")
        self._attempts = attempts
        self._files, root = _open(runs_dir)
        self._root = f"{root}/{name}" if name else root
        protocol = runs_dir.partition("://")[0]
        self._is_s3 = protocol in EXTRAS
        self._has_folders = protocol in WITH_FOLDERS or isinstance(self._files, LocalFiles)

    def objects(self, inside: str = "") -> dict[str, Stored]:
        """Return all objects (under `inside`) by name, relative to the address."""
        found = self._asked(lambda path: self._files.find(path, detail=True), inside, missing={})
        start = len(self._root) + 1
        return {path[start:]: _stored(info) for path, info in found.items()}

    def folders(self) -> list[str]:
        """Return the names of the folders at the address; `UsageError` if it has no bucket."""
        found = self._asked(lambda path: self._files.ls(path, detail=True), "", missing=[])
        bucket = self._root.lstrip("/").partition("/")[0]
        if not (
            found or self._has_folders or self._retried(lambda: self._files.exists(bucket), "")
        ):
            problem = f"{self.address}: the bucket {bucket} is not there, or may not be listed"
            raise UsageError(problem, "correct the address, or the store's credentials")
        paths = [info["name"].rstrip("/") for info in found if info["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths)

    def about(self, name: str) -> Stored | None:
        """Return what the store says of one object; None if there is none."""
        found = self._asked(self._files.info, name, missing=None)
        return None if found is None else _stored(found)

    def send(self, source: BinaryIO, name: str) -> Stored:
        """Write an open file, a long one in parts; what is there is compared by its size."""
        size, options = os.fstat(source.fileno()).st_size, dict[str, Any]()
        if size <= PART_BYTES:  # as it is at one moment
            return self.write(name, source.read())
        if self._is_s3:
            part = max(PART_BYTES, size // MOST_PARTS + 1)
            options = {"chunksize": part, "max_concurrency": PARTS_AT_ONCE}

        def put() -> None:
            self._make_folder(name)
            opened = f"/dev/fd/{source.fileno()}"  # not the path, where a link may stand now
            self._files.put_file(opened, self._path(name), **options)

        self._retried(put, name)
        return self._check(name, None if name.endswith(GROWING) else size)

    def write(self, name: str, content: bytes) -> Stored:
        """Write an object whole: S3 shows readers the old or the new content."""

        def put() -> None:
            self._make_folder(name)
            self._files.pipe_file(self._path(name), content)

        self._retried(put, name)
        return self._check(name, len(content))

    def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return an object's content from byte `start` to `end`, by default all."""
        path, part = self._path(name), {"start": start or None, "end": end}
        return self._retried(lambda: bytes(self._files.cat_file(path, **part)), name)

    def parts(self, name: str, *, start: int = 0, end: int) -> Iterator[bytes]:
        """Yield an object's content from byte `start` to `end` in parts that fit in memory."""
        for first in range(start, end, PART_BYTES):
            yield self.read(name, start=first, end=min(first + PART_BYTES, end))

    def fetch(self, name: str, file: Path) -> None:
        """Write an object to a local file."""
        self._retried(lambda: self._files.get_file(self._path(name), str(file)), name)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects in the order of `names`; missing ones are ignored."""
        for name in names:
            self._asked(self._files.rm_file, name, missing=None)

    def check_writable(self) -> None:
        """Raise `StoreError` if nothing can be written, `UsageError` if waiting would not help."""
        try:
            name = f".check-{secrets.token_hex(8)}"  # nothing of anybody's is called so
            self.write(name, b"")
            self.delete([name])
        except StoreError as error:
            if error.final:
                raise UsageError(error.problem, error.fix) from None
            raise

    def _make_folder(self, name: str) -> None:
        if self._has_folders:
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _check(self, name: str, size: int | None) -> Stored:
        found = self.about(name)
        if found is None or (size is not None and found.bytes != size):
            there = f"{found.bytes} bytes there instead of {size}" if found else "not there"
            raise StoreError(f"{self.address}/{name}: {there} after a write", "send it again")
        return found

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _asked(self, action: Callable[[str], Any], name: str, *, missing: Any) -> Any:
        """Return what `action` returns for the path of `name`; `missing` if nothing is there."""

        def ask() -> Any:
            self._files.invalidate_cache()
            try:
                return action(self._path(name))
            except FileNotFoundError:
                return missing

        return self._retried(ask, name)

    def _retried(self, action: Callable[[], T], name: str) -> T:
        pause_s = PAUSE_S
        for attempt in range(1, self._attempts + 1):
            try:
                return action()
            except Exception as error:
                final = isinstance(error, FINAL) or type(error).__name__ in FINAL_NAMES
                final = final or getattr(error, "errno", None) in FINAL_CODES
                if final or attempt == self._attempts:
                    where = f"{self.address}/{name}" if name else self.address
                    problem = f"{where}: {_reason(error)}"
                    fix = _fix(error, has_folders=self._has_folders)
                    failed = StoreError(problem, fix)
                    failed.final = final
                    raise failed from None  # its text may hold a secret
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError


def _open(address: str) -> tuple[Any, str]:
    """Return fsspec's file system, or `LocalFiles`, and the path in it.

    Raises `UsageError` if fsspec's driver is missing.
    """
    protocol = address.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        options: dict[str, Any] = {"use_listings_cache": False}
        if protocol in EXTRAS:
            options |= {"config_kwargs": {"retries": {"total_max_attempts": 2}}}
        files, root = url_to_fs(address, **options)
        files.retries = 2  # of s3fs, within each of `ATTEMPTS`
    except ImportError:
        extra = "pip install 'colotrain[store]'"
        fix = extra if protocol in EXTRAS else f"install fsspec's driver for {protocol}"
        raise UsageError(f"{address}: the driver for {protocol} is not installed", fix) from None
    except ValueError:
        fix = "write an address such as s3://bucket/path"
        raise UsageError(f"{address}: fsspec knows no {protocol}", fix) from None
    if isinstance(files, LocalFileSystem):
        return LocalFiles(Path(root)), str(root).rstrip("/")
    return files, str(root).rstrip("/")


def _stored(info: dict[str, Any]) -> Stored:
    token = next((str(info[key]) for key in TOKENS if info.get(key) is not None), "")
    written = next((info[k] for k in WRITTEN if info.get(k)), 0.0)
    seconds = written.timestamp() if hasattr(written, "timestamp") else float(written)
    return Stored(bytes=int(info["size"]), token=token, modified_at=seconds)


def _reason(error: BaseException) -> str:
    """Return the type of an error and what stores, or this system, call its code."""
    cause = error.__cause__ if error.__cause__ is not None else error
    answer = getattr(cause, "response", None)
    code = answer.get("Error", {}).get("Code", "") if isinstance(answer, dict) else ""
    if not code and isinstance(error, OSError) and isinstance(error.errno, int):
        code = os.strerror(error.errno)
    return f"{type(error).__name__} ({code})" if code else type(error).__name__


def _fix(error: BaseException, *, has_folders: bool) -> str:
    code = getattr(error, "errno", None)
    if has_folders and code in STRANGE:
        return "look at it: links, FIFOs and devices in a store are not followed"
    if has_folders and (isinstance(error, PermissionError) or code == errno.EROFS):
        return "make the folder writable for you, or name another runs_dir"
    if isinstance(error, PermissionError) or type(error).__name__ in FINAL_NAMES:
        return "set the store's credentials in the environment, as in AWS_ACCESS_KEY_ID"
    if isinstance(error, FileNotFoundError):
        return "make the bucket, or correct the address"
    return "look whether the store can be reached from here"


class LocalFiles:
    """The files below `folder`, which is a store, with the methods of fsspec's drivers.

    Only regular files count, and no link is followed below the folder, which may be a link itself.
    Paths are absolute; others than those below it raise `OSError`.
    """

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
