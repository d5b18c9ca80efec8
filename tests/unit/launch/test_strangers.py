"""What somebody on the network without a run's secret tries at its launchers and ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from colotrain.engine.state.buddy import Buddy, RemoteLauncher
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.launch.copy_keeper import CopyKeeper
from colotrain.launch.membership import Membership
from colotrain.launch.node_registry import NodeInfo
from tests.copies import piece_of
from tests.relay import Relay, peak_kib

WEIGHTS = b"of the weights:"
SERVER = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from types import SimpleNamespace
from colotrain.launch.copy_keeper import CopyKeeper
from colotrain.launch.node_registry import NodeInfo, NodeRegistry
listener = socket.create_server(("127.0.0.1", 0))
if sys.argv[1] == "registry":
    info = NodeInfo(node=0, host="a", instance="x", versions={}, plan={})
    NodeRegistry(listener, secret="secret", info=info, min_nodes=1, max_nodes=2,
                 expected_nodes=1, open_store=lambda *_: 1, plan_digest="")
else:
    files = SimpleNamespace(handles=[])
    CopyKeeper(listener, secret=lambda: "secret", files=files)
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""


def copy(handle: int, number: int) -> MemoryFile:
    file = MemoryFile(f"/proc/{os.getpid()}/fd/{handle}")
    data = torch.frombuffer(bytearray(WEIGHTS * 5000), dtype=torch.uint8)
    file.write([piece_of("t", data)], {"number": number})
    return file


def test_who_passes_on_what_is_said_reads_no_copy_that_is_sent(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    relay = Relay(("127.0.0.1", keeper.port))
    link = Buddy(relay.address, 3, secret="secret")
    with contextlib.suppress(OSError, ValueError):  # or it is not sent at all
        link.send(copy(handles[0], 1), 1, beside=0)
    assert WEIGHTS not in relay.seen[True] + relay.seen[False]


def test_who_passes_on_what_is_said_reads_no_copy_that_is_asked_for(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    about = copy(handles[1], 1).read()
    assert about is not None
    (chunk,) = about["tensors"]["t"]["chunks"]
    relay = Relay(("127.0.0.1", keeper.port))
    link = RemoteLauncher(relay.address, secret="secret")
    with contextlib.suppress(OSError, ValueError):
        link.read_into(handles[1], chunk["start"], memoryview(bytearray(chunk["length"])))
    assert WEIGHTS not in relay.seen[True] + relay.seen[False]


def test_who_passed_on_a_proof_frees_no_copies(keeper: CopyKeeper, handles: list[int]) -> None:
    """What he adds to a connection that others have proved is not heeded."""
    Buddy(f"127.0.0.1:{keeper.port}", 3, secret="secret").send(copy(handles[0], 1), 1, beside=0)
    relay = Relay(("127.0.0.1", keeper.port))
    with contextlib.suppress(OSError, ValueError):
        reader = RemoteLauncher(relay.address, secret="secret")
        reader.read_into(handles[1], 0, memoryview(bytearray(0)))
    relay.add(json.dumps({"free_before": 9}).encode() + b"\n")
    time.sleep(0.5)
    assert os.fstat(keeper.handles()[0]).st_size > 0


def answer(made: socket.socket, told: list[bytes]) -> None:
    """Say what a keeper or a registry would that checks nothing, and note what is sent."""
    with made, contextlib.suppress(OSError):
        made.sendall(b'{"nonce": "0"}\n')
        told.append(made.recv(1 << 16))
        made.sendall(b'{"refused": "", "final": false}\n')
        while data := made.recv(1 << 16):
            told.append(data)
            made.sendall(b'{"round": 1, "nodes": [0, 1], "port": 1, "closed": "a stranger says"}\n')


@pytest.fixture
def stranger() -> Iterator[tuple[int, list[bytes]]]:
    """Port of one who answers as if he were node 0 or a keeper, and what he was told."""
    told: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    answer(listener.accept()[0], told)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], told
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def test_no_copy_is_sent_to_one_who_does_not_know_the_secret(
    stranger: tuple[int, list[bytes]], handles: list[int]
) -> None:
    port, told = stranger
    with contextlib.suppress(OSError, ValueError):
        Buddy(f"127.0.0.1:{port}", 3, secret="secret").send(copy(handles[0], 1), 1, beside=0)
    assert WEIGHTS not in b"".join(told)


def test_a_launcher_heeds_no_node_0_that_does_not_know_the_secret(
    stranger: tuple[int, list[bytes]],
) -> None:
    """It told him its plan, and went where he said."""
    port, told = stranger
    info = NodeInfo(node=1, host="b", instance="y", versions={}, plan={"private": "plan"})
    member = Membership(("127.0.0.1", port), info, secret=lambda: "secret", lost_s=5)
    time.sleep(1)
    state, error = dict(member.state), member.error
    member.end()
    assert state == {}
    assert error is None
    assert b"private" not in b"".join(told)


@dataclass(frozen=True, slots=True)
class Server:
    """A registry or a keeper in a process of its own, which may open 256 files."""

    name: str
    port: int
    process: subprocess.Popen[str]

    def most_kib(self) -> int:
        """Return how much memory it has taken so far."""
        return peak_kib(self.process.pid)


@pytest.fixture(params=["registry", "keeper"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    words = [sys.executable, "-c", SERVER, request.param]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield Server(request.param, int(process.stdout.readline()), process)
    process.kill()
    process.communicate()


def works(name: str, port: int) -> bool:
    """Whether one who knows the secret is served."""
    if name == "keeper":
        RemoteLauncher(f"127.0.0.1:{port}", secret="secret").free_before(1)
        return True
    info = NodeInfo(node=1, host="b", instance="y", versions={}, plan={})
    member = Membership(("127.0.0.1", port), info, secret=lambda: "secret", lost_s=20)
    deadline = time.monotonic() + 15
    while not member.state and time.monotonic() < deadline:
        time.sleep(0.05)
    found = bool(member.state)
    member.end()
    return found


def test_idle_connections_do_not_stop_a_launcher(server: Server) -> None:
    """600 from many addresses, where it may open 256 files: it took that for its end."""
    idle = list[socket.socket]()
    for index in range(600):
        made = socket.socket()
        made.setblocking(False)
        made.bind((f"127.0.2.{index % 200 + 1}", 0))
        with contextlib.suppress(OSError):
            made.connect(("127.0.0.1", server.port))
        idle.append(made)
        if index % 50 == 0:
            time.sleep(0.1)
    time.sleep(0.5)
    for made in idle:
        made.close()
    assert works(server.name, server.port)


def test_lines_without_an_end_do_not_fill_a_launcher(server: Server) -> None:
    before, senders = server.most_kib(), list[socket.socket]()
    for _ in range(50):
        made = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        senders.append(made)
        with contextlib.suppress(OSError):
            made.sendall(b"9" * ((4 << 20) - 1))
    time.sleep(1)
    assert server.most_kib() - before < 24 << 10
    for made in senders:
        made.close()
    assert works(server.name, server.port)
