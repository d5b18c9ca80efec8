"""A local S3 server (moto), and a proxy before it that is slow, fails and breaks connections."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from colotrain.runs.store import Store

BUCKET = "bucket"
KEY_ID, SECRET = "AKIATESTONLYTESTONLY", "secret-of-the-tests-only/0123456789abcdef"
HOST = "127.0.0.1"
START_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def environment(port: int) -> dict[str, str]:
    """Variables by which S3 clients find the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def server() -> Iterator[int]:
    """Run moto's server in a process of its own, with one bucket; yield its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            request = urllib.request.Request(f"http://{HOST}:{port}/{BUCKET}", method="PUT")
            try:
                urllib.request.urlopen(request, timeout=START_S).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server has ended"
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Proxy:
    """Passes requests on to a server; `faults` decides which are slow or fail."""

    server_port: int
    delay_s: float = 0.0
    failing: float = 0.0
    """Share of requests that fail: half with status 503, half without an answer."""
    seed: int = 0
    port: int = field(default_factory=free_port)
    requests: int = 0
    failed: int = 0
    down_until: float = 0.0
    _open: set[socket.socket] = field(default_factory=set)

    def cut(self, seconds: float) -> None:
        """Break all connections, and every new one for some seconds."""
        self.down_until = time.monotonic() + seconds
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self.down_until

    def __enter__(self) -> Proxy:
        chance, lock, proxy = random.Random(self.seed), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def setup(self) -> None:
                super().setup()
                proxy._open.add(self.connection)
                if proxy.is_down:
                    self.connection.shutdown(socket.SHUT_RDWR)

            def finish(self) -> None:
                proxy._open.discard(self.connection)
                with suppress(OSError, ValueError):
                    super().finish()

            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    draw = chance.random()
                    proxy.requests += 1
                    proxy.failed += draw < proxy.failing
                time.sleep(proxy.delay_s)
                if draw < proxy.failing:
                    if draw < proxy.failing / 2:
                        self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                    else:
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                onward = http.client.HTTPConnection(HOST, proxy.server_port, timeout=60)
                try:
                    onward.request(self.command, self.path, body, dict(self.headers.items()))
                    found = onward.getresponse()
                    self.answer(found.status, dict(found.getheaders()), found.read())
                finally:
                    onward.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

            def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                skipped = ("connection", "transfer-encoding", "date", "server")
                length = headers.pop("Content-Length", str(len(content)))
                with suppress(OSError):  # cut meanwhile
                    self.send_response(status)
                    for name, value in headers.items():
                        if name.lower() not in skipped:
                            self.send_header(name, value)
                    self.send_header("Content-Length", length)
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                """Ignore connections that were cut."""

        self._server = Server((HOST, self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def open_store(address: str, port: int) -> Store:
    """A store read past the proxy, for checks."""
    with variables(environment(port)):
        return Store(address)
