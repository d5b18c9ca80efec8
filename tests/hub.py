"""A Hugging Face Hub on loopback, with the repositories that a test gives it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

COMMIT = "a1" * 20
"""The commit of every repository; its branch is `main`."""


class Hub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks in order to download a snapshot."""

    folders: ClassVar[dict[str, Path]] = {}
    gated: ClassVar[tuple[str, ...]] = ()
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, what, *rest = [*(parts[2:] if is_api else parts), "", "", "", ""]
        repository = f"{owner}/{name}"
        folder = self.folders.get(repository)
        if repository in self.gated:
            self.refuse(403, "GatedRepo")
        elif folder is None:
            self.refuse(401, "RepoNotFound")
        elif rest[0] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif is_api and what == "revision":
            self.give(json.dumps({"id": repository, "sha": COMMIT, "siblings": []}).encode())
        elif is_api:
            self.give(json.dumps([described(path, folder) for path in files_of(folder)]).encode())
        else:
            path = folder.joinpath(*rest[1:])
            self.give(path.read_bytes(), path=path, with_body=with_body)

    def give(self, body: bytes, *, path: Path | None = None, with_body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        if path is not None:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def described(path: Path, folder: Path) -> dict[str, Any]:
    content = path.read_bytes()
    name = path.relative_to(folder).as_posix()
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


@contextmanager
def serving(folders: dict[str, Path], *, gated: tuple[str, ...] = ()) -> Iterator[tuple[str, list]]:
    """A hub with these repositories: its address, and the paths that it was asked for."""
    asked: list[str] = []
    handler = type("Served", (Hub,), {"folders": folders, "gated": gated, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
