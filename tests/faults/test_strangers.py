"""Who is on the network of a run, without its folder and secret, joins, reads and ends nothing."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.dist.conftest import Colotrain
from tests.dist.test_run import wait_for_step
from tests.faults.hosts import Host, missing, network
from tests.faults.test_hosts import PLAN, PORT, begin, end, events

REASON = missing()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.slow]

NUM_CONNECTIONS, ATTACK_S, MOST_S = 5000, 10, 90
STRANGER = """
import contextlib, json, resource, select, socket, ssl, sys, time
address, count, for_s, most_s = sys.argv[1], *map(int, sys.argv[2:5])
ports = sys.argv[5:]
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
out = ssl.MemoryBIO()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with contextlib.suppress(ssl.SSLWantReadError):
    context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
first = b'{"nonce": "0", "proof": "0", "rank": 0, "round": 1, "waits": true, "close": "x"}\\n'
words = [b"", out.read(), first, b"x" * 100_000]
made, open_now, read, began = 0, {}, bytearray(), time.monotonic()
poll = select.epoll()
while time.monotonic() < began + (for_s if made >= count else most_s):
    if made < count or len(open_now) < count:
        one = socket.socket()
        one.settimeout(2)
        try:
            one.connect((address, int(ports[made % len(ports)])))
            one.setblocking(False)
            one.send(words[made // len(ports) % len(words)])
            poll.register(one, select.EPOLLIN)
            open_now[one.fileno()] = one
        except OSError:
            one.close()
        made += 1
    for handle, _ in poll.poll(0):
        data = b""
        with contextlib.suppress(OSError):
            data = open_now[handle].recv(1 << 16)
        read += data
        if not data:
            open_now.pop(handle).close()
print(json.dumps({"made": made, "open": len(open_now), "read": read.hex()}))
"""


def listening(host: Host) -> set[int]:
    """The ports at which a host's processes listen at all its addresses."""
    table = Path(f"/proc/{host.processes[0].pid}/net/tcp6").read_text().splitlines()[1:]
    rows = (line.split() for line in table)
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def memory(host: Host) -> int:
    """Bytes of the host's launcher."""
    [launcher] = psutil.Process(host.processes[0].pid).children()
    return int(launcher.memory_info().rss)


@pytest.fixture
def few_files() -> Iterator[None]:
    """As many open files as most systems let a process have; the stranger takes more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_five_thousand_connections_of_a_stranger_neither_end_nor_read_a_run(
    few_files: None, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """At the registry and at the keeper of copies: idle ones, begun proofs, garbage, long lines."""
    settings = ("train.max_steps=100000", "cluster.procs_per_node=1", "train.global_batch=8")
    settings += ("elastic.memory_copy=1GiB", "plugin.shard_size=1", "train.eval_every=0")
    with network(3, tmp_path) as hosts:
        started = begin(hosts[:2], tmp_path, "open", *settings, nodes=2)
        wait_for_step(Colotrain(tmp_path), "open", 50)
        ports = listening(hosts[0])
        assert PORT in ports
        before, first = memory(hosts[0]), len(events(tmp_path, "open", "step"))
        words = map(str, (hosts[0].address, NUM_CONNECTIONS, ATTACK_S, MOST_S, *sorted(ports)))
        stranger = hosts[2].start(sys.executable, "-c", STRANGER, *words, cwd=tmp_path)
        code, out, err = end(stranger)
        assert code == 0, err
        after, last = memory(hosts[0]), len(events(tmp_path, "open", "step"))
        wait_for_step(Colotrain(tmp_path), "open", last // 2 + 20)
        Colotrain(tmp_path).rundir("open").stop_file.touch()
        ended = [end(process) for process in started]
    assert [code for code, _, _ in ended] == [75, 75], ended
    summary, told = json.loads(ended[0][1]), json.loads(out)
    steps = [event.fields["step_s"] for event in events(tmp_path, "open", "step")]
    assert told["made"] >= NUM_CONNECTIONS
    assert last > first
    assert summary["restarts"] == 0
    read = bytes.fromhex(told["read"])
    assert not [word for word in (b"nonce", b"round", b"weight") if word in read]
    assert len(ports) == 2, f"the store listens at all addresses, too: {ports}"
    assert after - before < 64 << 20
    record_property("alone_ms", 1000 * median(steps[20:first] + steps[last:]))
    record_property("beside_ms", 1000 * median(steps[first:last]))
    record_property("memory_mib", (after - before) / 2**20)
    record_property("stranger", f"{told['made']} made, {told['open']} open")


LONG = """
import time
import torch
from torch import nn
from colotrain.engine.step import monitor
monitor.LONG_STEP_S = -1.0

class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.count = 0

    def forward(self, x):
        self.count += self.training
        time.sleep(10 if self.training and self.count == 3 else 0)
        return super().forward(x).square().mean()

def data():
    return [{"x": torch.ones(4)}] * 20
"""
PREFIXES = ("default_pg/", "default_pg/0//")


def test_a_stranger_who_writes_into_the_store_ends_no_run(tmp_path: Path) -> None:
    """In the middle of the third step; all ranks left it, and the run ended as preempted."""
    from torch.distributed import TCPStore

    (tmp_path / "long.py").write_text(LONG)
    words = ("model.target=long:Model", "data.target=long:data", "train.max_steps=4")
    words += ("train.global_batch=2", "train.micro_batch=1", "plugin=zero2")
    colotrain = Colotrain(tmp_path)
    process = colotrain.start("run", *words, "cluster.procs_per_node=2", "name=open", "--json")
    wait_for_step(colotrain, "open", 2)
    listeners = psutil.Process(process.pid).net_connections("tcp")
    [port] = {c.laddr.port for c in listeners if c.status == psutil.CONN_LISTEN}
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for prefix in PREFIXES:
        store.set(f"{prefix}colotrain/step-left", "2 preempted")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 4


def test_five_thousand_connections_at_the_store_end_no_run(few_files: None, tmp_path: Path) -> None:
    """Torch's store takes them all, in node 0's launcher, which had no handles left after 4,096."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < 2 * NUM_CONNECTIONS:
        pytest.skip(f"a process may open {most} files")
    colotrain = Colotrain(tmp_path)
    words = ("cluster.procs_per_node=2", "train.max_steps=60", "checkpoint.every=20")
    process = colotrain.start("run", *PLAN, *words, "name=full", "--json")
    wait_for_step(colotrain, "full", 5)
    listeners = psutil.Process(process.pid).net_connections("tcp")
    [port] = {c.laddr.port for c in listeners if c.status == psutil.CONN_LISTEN}
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    idle = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(NUM_CONNECTIONS)]
    out, err = process.communicate(timeout=180)
    for made in idle:
        made.close()
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["steps"], summary["restarts"]) == (60, 0)
    assert len(events(tmp_path, "full", "checkpoint")) == 3
