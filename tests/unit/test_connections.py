"""Connections of a run's processes: who does not know its secret learns and changes nothing,
whatever he passes on, repeats, reflects or opens."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colotrain import connections
from colotrain.addresses import network_of
from colotrain.certificates import key_and_certificate, tls_context
from colotrain.connections import Link, Service, StrangerError, connect
from tests.relay import Relay, peak_kib

WITHIN_S = 20.0
CHECK_SELF_SIGNED = 0x4000
"""OpenSSL's X509_V_FLAG_CHECK_SS_SIGNATURE."""


class Echo:
    """A service that returns what it is told, and knows what it was told."""

    def __init__(self, secret: str = "secret") -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.where: tuple[str, int] = listener.getsockname()
        self.told: list[object] = []
        self.errors: list[BaseException] = []
        self.service = Service(listener, self.serve, secret=lambda: secret, name="echo")

    def serve(self, link: Link) -> None:
        try:
            while True:
                link.wait()
                self.told.append(link.read(within_s=WITHIN_S))
                link.send({"echo": self.told[-1]}, within_s=WITHIN_S)
        except (OSError, ValueError) as error:
            self.errors.append(error)

    def link(self, where: tuple[str, int] | None = None, secret: str = "secret") -> Link:
        return connect(where or self.where, secret=secret, service="echo", within_s=WITHIN_S)


def ask(link: Link, text: str) -> object:
    link.send({"text": text}, within_s=WITHIN_S)
    return link.read(within_s=WITHIN_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.service.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is cut is not made again: the attacker cuts the next one, too."""
    monkeypatch.setattr(connections, "AGAIN_S", 0.0)


def test_both_sides_speak_tls_1_3(echo: Echo) -> None:
    link = echo.link()
    assert link.socket.version() == "TLSv1.3"
    assert not link.socket.session_reused
    assert ask(link, "hello") == {"echo": {"text": "hello"}}


def test_who_passes_everything_on_reads_nothing(echo: Echo) -> None:
    between = Relay(echo.where)
    link = echo.link(between.where)
    assert ask(link, "weights " * 500) == {"echo": {"text": "weights " * 500}}
    seen = between.seen[True] + between.seen[False]
    assert len(seen) > 8000
    assert not [word for word in (b"weights", b"echo", b"text", b"secret") if word in seen]


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("where", ["in the proof", "in a message", "at its end"])
def test_a_byte_that_is_changed_on_the_way_ends_the_connection(
    echo: Echo, is_client: bool, where: str
) -> None:
    begun = threading.Event()

    def change(data: bytes, at: int, from_client: bool) -> bytes:
        if from_client != is_client or (where == "in the proof") == begun.is_set():
            return data
        place = {"in the proof": len(data) // 2, "in a message": 7, "at its end": -1}[where]
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)

    def speak() -> None:
        link = echo.link(between.where)
        begun.set()
        ask(link, "stop")

    between = Relay(echo.where, change)
    with pytest.raises((OSError, ValueError)):
        speak()
    assert echo.told == ([{"text": "stop"}] if begun.is_set() and not is_client else [])


@pytest.mark.parametrize("part", ["all", "without the first message", "the messages alone"])
def test_what_was_said_before_is_of_no_use(echo: Echo, part: str) -> None:
    between = Relay(echo.where)
    link = echo.link(between.where)
    proof = len(between.seen[True])
    ask(link, "free everything")
    said = between.seen[True]
    again = {
        "all": said,
        "without the first message": said[517:],
        "the messages alone": said[proof:],
    }
    stranger = socket.create_connection(echo.where, timeout=WITHIN_S)
    with stranger, contextlib.suppress(OSError):
        stranger.sendall(again[part])
        while stranger.recv(1 << 16):
            pass
    assert echo.told == [{"text": "free everything"}]


def test_what_one_side_says_is_not_taken_for_the_other(echo: Echo) -> None:
    """Both have the same key, so that its proofs could be reflected."""
    with socket.create_server(("127.0.0.1", 0)) as mirror:

        def reflect() -> None:
            made, _ = mirror.accept()
            with made, contextlib.suppress(OSError):
                while data := made.recv(1 << 16):
                    made.sendall(data)

        threading.Thread(target=reflect, daemon=True).start()
        with pytest.raises(OSError):  # noqa: PT011
            echo.link(mirror.getsockname())
    with socket.create_connection(echo.where, timeout=WITHIN_S) as stranger:
        hello = ssl.MemoryBIO()
        made = tls_context("other", "echo", is_server=False).wrap_bio(ssl.MemoryBIO(), hello)
        with contextlib.suppress(ssl.SSLWantReadError):
            made.do_handshake()
        stranger.sendall(hello.read())
        with contextlib.suppress(OSError):
            while data := stranger.recv(1 << 16):
                stranger.sendall(data)
    assert echo.told == []


@pytest.mark.parametrize(("secret", "service"), [("of another run", "echo"), ("secret", "copies")])
def test_who_has_another_key_is_no_side_of_it(echo: Echo, secret: str, service: str) -> None:
    """Another run's launcher, and another service of this run."""
    with pytest.raises(StrangerError, match="does not know the secret"):
        connect(echo.where, secret=secret, service=service, within_s=WITHIN_S)
    with pytest.raises(StrangerError, match="knows no secret"):
        connect(echo.where, secret="", service=service, within_s=WITHIN_S)

    def speak() -> None:
        """TLS 1.3 tells the client late that its proof is not taken."""
        made = socket.create_connection(echo.where, WITHIN_S)
        ask(Link(careless.wrap_socket(made)), "stop")

    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    for own in (None, key_and_certificate(secret, service)):
        if own is not None:
            handle = os.memfd_create("test")
            os.write(handle, "".join(own).encode())
            careless.load_cert_chain(f"/proc/self/fd/{handle}")
            os.close(handle)
        with pytest.raises(OSError):  # noqa: PT011
            speak()
    assert echo.told == []


def test_before_a_secret_is_known_nobody_is_served() -> None:
    """A node opens its keeper before node 0 has written the secret; "" is no secret."""
    unready = Echo("")
    with socket.create_connection(unready.where, timeout=WITHIN_S) as stranger:
        hello = ssl.MemoryBIO()
        made = tls_context("any", "echo", is_server=False).wrap_bio(ssl.MemoryBIO(), hello)
        with contextlib.suppress(ssl.SSLWantReadError):
            made.do_handshake()
        with contextlib.suppress(OSError):
            stranger.sendall(hello.read())
            assert stranger.recv(1 << 16) == b""
    for is_server in (False, True):
        with pytest.raises(ValueError, match="no secret"):
            tls_context("", "echo", is_server=is_server)
    unready.service.close()
    assert unready.told == []


@pytest.mark.parametrize("versions", [ssl.TLSVersion.TLSv1_2])
def test_no_older_version_is_spoken(echo: Echo, versions: ssl.TLSVersion) -> None:
    handle = os.memfd_create("test")
    os.write(handle, "".join(key_and_certificate("secret", "echo")).encode())
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = versions
    older.load_cert_chain(f"/proc/self/fd/{handle}")
    os.close(handle)
    with pytest.raises(OSError):  # noqa: PT011
        older.wrap_socket(socket.create_connection(echo.where, WITHIN_S))


def test_a_message_must_arrive_in_time_and_end(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even from one who knows the secret; a byte now and then does not help."""
    monkeypatch.setattr(sys.modules[__name__], "WITHIN_S", 1.0)
    link, began = echo.link(), time.monotonic()
    with contextlib.suppress(OSError):
        while not echo.errors and time.monotonic() < began + 15:
            link.socket.sendall(b" ")
            time.sleep(0.05)
    assert isinstance(echo.errors[0], TimeoutError)
    monkeypatch.setattr(connections, "LINE_BYTES", 1 << 16)
    monkeypatch.setattr(sys.modules[__name__], "WITHIN_S", 20.0)
    link = echo.link()
    with contextlib.suppress(OSError):
        link.socket.sendall(b" " * (1 << 20))
        link.socket.recv(1)
    assert "too long" in str(echo.errors[1])
    assert echo.told == []


def test_the_key_and_the_certificate_follow_from_the_secret(tmp_path: Path) -> None:
    key, certificate = key_and_certificate("secret", "echo")
    assert key_and_certificate("secret", "echo") == (key, certificate)
    others = [("secret", "copies"), ("other", "echo")]
    found = {key, *(key_and_certificate(*other)[0] for other in others)}
    assert len(found) == 3
    (tmp_path / "key.pem").write_text(key)
    (tmp_path / "own.pem").write_text(certificate)
    strict = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    strict.verify_flags |= ssl.VerifyFlags(CHECK_SELF_SIGNED)
    strict.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
    words = ["verify", "-check_ss_sig", "-x509_strict", "-CAfile", "own.pem", "own.pem"]
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(
            ["openssl", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.stdout == "own.pem: OK\n", done.stderr


def test_one_peer_is_an_address_or_a_network_of_the_sixth_version() -> None:
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("fd00::1") == network_of("fd00::ffff:2%eth0") != network_of("fd00:0:0:1::1")


# -- too many, too much

SERVER = """
import json, os, resource, socket, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
from colotrain import connections
from colotrain.connections import Service
connections.PROOF_S = float(sys.argv[2])
def serve(link):
    while True:
        link.wait()
        link.send({"echo": link.read(within_s=20)}, within_s=20)
listener = socket.create_server(("127.0.0.1", 0))
Service(listener, serve, secret=lambda: "secret", name="echo")
print(listener.getsockname()[1], flush=True)
handles = []
for line in sys.stdin:
    if line == "fill\\n":
        try:
            while True:
                handles.append(os.dup(0))
        except OSError:
            pass
    if line == "free\\n":
        for handle in handles:
            os.close(handle)
    print("done", flush=True)
"""


class Child:
    """A service in a process that may open few files."""

    def __init__(self, files: int, proof_s: float = 10.0) -> None:
        words = [sys.executable, "-c", SERVER, str(files), str(proof_s)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.where = "127.0.0.1", int(self.process.stdout.readline())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def link(self) -> Link:
        return connect(self.where, secret="secret", service="echo", within_s=60)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def begin(files: int, proof_s: float = 10.0) -> Child:
        made.append(Child(files, proof_s))
        return made[-1]

    yield begin
    for child in made:
        child.end()


@pytest.fixture
def files() -> Iterator[None]:
    """As many open files as the attacker needs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def hello() -> bytes:
    """The first message of a handshake."""
    out = ssl.MemoryBIO()
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        made.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


@pytest.mark.parametrize(("addresses", "first"), [(1, b""), (200, b""), (200, hello())])
def test_idle_connections_keep_nobody_out(
    start: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    files: None,
    addresses: int,
    first: bytes,
) -> None:
    """From one address or many, and with a handshake that was begun."""
    monkeypatch.setattr(connections, "AGAIN_S", 30.0)
    child = start(256)
    earlier = child.link()
    idle = []
    for index in range(1100):
        stranger = socket.socket()
        stranger.settimeout(5)
        stranger.bind((f"127.0.1.{index % addresses + 1}", 0))
        with contextlib.suppress(OSError):
            stranger.connect(child.where)
            stranger.sendall(first)
        idle.append(stranger)
    assert ask(earlier, "still") == {"echo": {"text": "still"}}
    assert ask(child.link(), "new") == {"echo": {"text": "new"}}
    for stranger in idle:
        stranger.close()


def test_large_messages_without_a_proof_take_no_memory(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 of 4 MiB: of any bytes, of a line, and as one endless handshake."""
    monkeypatch.setattr(connections, "AGAIN_S", 30.0)
    child = start(1024)
    ask(child.link(), "warm")
    before = peak_kib(child.process.pid)
    # a record of 16 KiB, the first of which begins a message of 16 MiB
    record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes(0x4000 - 4)
    strangers = []
    for index in range(200):
        stranger = socket.create_connection(child.where, timeout=5)
        stranger.setblocking(False)
        data = (os.urandom(64) * 65536, b"9" * (4 << 20), record * 256)[index % 3]
        with contextlib.suppress(OSError):
            while data:
                data = data[stranger.send(data) :]
        strangers.append(stranger)
    assert ask(child.link(), "new") == {"echo": {"text": "new"}}
    assert peak_kib(child.process.pid) - before < 24 << 10
    for stranger in strangers:
        stranger.close()


def test_a_process_without_free_handles_listens_on(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AGAIN_S", 0.0)
    child = start(128)
    child.tell("fill")
    waiting = [socket.create_connection(child.where, timeout=5) for _ in range(20)]
    time.sleep(0.5)
    child.tell("free")
    for stranger in waiting:
        stranger.close()
    monkeypatch.setattr(connections, "AGAIN_S", 30.0)
    assert ask(child.link(), "new") == {"echo": {"text": "new"}}


def test_a_proof_that_does_not_come_ends_the_connection(start: Callable[..., Child]) -> None:
    """Though a byte comes now and then."""
    child = start(128, 1.0)
    with socket.create_connection(child.where, timeout=WITHIN_S) as stranger:
        began, said = time.monotonic(), hello()
        with contextlib.suppress(OSError):
            for byte in said:
                stranger.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - began < 15
        assert len(said) * 0.1 > 15


def test_messages_are_json_alone() -> None:
    """No collective of torch's objects is used, nor anything else that unpickles."""
    root = Path(connections.__file__).parent
    words = ("object_list(", "gather_object(", "pickle.load", "weights_only=False")
    found = [
        f"{path.relative_to(root)}: {word}"
        for path in root.rglob("*.py")
        for word in words
        if word in path.read_text("utf-8")
    ]
    assert found == []
    assert json.loads(json.dumps({"a": [1, None, float("inf")]})) == {"a": [1, None, float("inf")]}


def test_it_is_told_once_that_there_are_too_many_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launchers were refused without a line that says why."""
    monkeypatch.setattr(connections, "PROVED", 4)
    echo, said, told = Echo(), list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    echo.service.say = say
    links = [echo.link() for _ in range(4)]
    for number, link in enumerate(links):
        ask(link, str(number))
    for _ in range(3):
        with pytest.raises((OSError, ValueError)):
            ask(echo.link(), "one more")
    assert told.wait(5)
    (line,) = said
    assert line.startswith("warning: echo: 4 connections are open, and more are refused")
    assert "`ulimit -n`" in line
    links.pop().close()
    deadline = time.monotonic() + 5
    while echo.service._num_proved > 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(echo.link(), "in its place") == {"echo": {"text": "in its place"}}
    echo.service.close()
