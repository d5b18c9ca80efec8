"""Encrypted connections between processes of one run, which prove to one another that they know
its secret: TLS 1.3 in which both sides have the key that follows from it (`certificates`).

Each service has a key of its own, so that nobody can pass one for another. Who only passes on what
both sides say reads nothing of it, and a byte that he changes ends the connection. Messages are
lines of JSON; nothing received is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colotrain.addresses import network_of, plain_address
from colotrain.certificates import tls_context

LINE_BYTES = 4 << 20
WINDOW_BYTES = 1 << 20
"""Bytes of a file that are sent or received at once."""
RECORD_BYTES = 16 << 10
PROOF_S = 20.0
"""Seconds within which a connection must have proved that it knows the secret."""
UNPROVED, UNPROVED_OF_ONE = 64, 24
"""Most connections that have not proved it yet: in all, and from one address."""
PROVED = 4096
"""Most connections that have, each of which is served by a thread."""
SAFE_S = 1.0
"""Seconds for which a connection without proof does not make room for another one."""
PAUSE_S = 0.1
AGAIN_S = 5.0
"""Seconds for which a connection that is cut before it is proved is made again."""
MALFORMED = (
    *(OSError, ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, RecursionError),
)
"""Errors of a connection, or of a message that is not as it should be (JSON has infinities)."""
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
"""Errors of a listener that was closed; others, such as too many open files, may pass."""


class StrangerError(ConnectionError):
    """The other side does not know the secret, or this one does not."""


class Link:
    """One end of a connection. All raises `OSError` and `ValueError`."""

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self.socket = secured
        self._received = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def cut(self) -> None:
        """End the connection of which another thread waits for something."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # TLS's own is not for threads

    @property
    def own_address(self) -> str:
        return plain_address(self.socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return plain_address(self.socket.getpeername()[0])

    def holds_data(self) -> bool:
        """Whether something has arrived that the system does not know of any more."""
        return bool(self._received) or self.socket.pending() > 0

    def wait(self) -> None:
        """Wait for the next message for as long as it takes."""
        self.socket.settimeout(None)
        if not self._received:
            self._receive(RECORD_BYTES)

    def send(self, document: dict[str, Any], *, within_s: float) -> None:
        self.socket.settimeout(within_s)
        self.socket.sendall(json.dumps(document).encode() + b"\n")

    def read(self, *, within_s: float) -> dict[str, Any]:
        """Return the next message, the whole of which must arrive within these seconds."""
        deadline, looked = time.monotonic() + within_s, 0
        while (end := self._received.find(b"\n", looked)) < 0:
            looked = len(self._received)
            if looked > LINE_BYTES:
                raise ValueError("a message is too long")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self.socket.settimeout(left_s)
            self._receive(RECORD_BYTES)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        return document

    def _receive(self, most: int) -> None:
        data = self.socket.recv(most)
        if not data:
            raise ConnectionError("the connection has ended")
        self._received += data

    def read_into(self, data: memoryview, *, stall_s: float) -> None:
        """Fill `data` with what arrives, of which something must within `stall_s`."""
        self.socket.settimeout(stall_s)
        if kept := min(len(self._received), len(data)):
            data[:kept] = self._received[:kept]
            del self._received[:kept]
            data = data[kept:]
        while data:
            if not (got := self.socket.recv_into(data)):
                raise ConnectionError("the connection has ended")
            data = data[got:]

    def send_file(self, handle: int, num_bytes: int, *, start: int = 0, stall_s: float) -> None:
        """Send bytes of a file from `start` on; `OSError` if it is shorter."""
        self.socket.settimeout(stall_s)
        at, end = start, start + num_bytes
        while at < end:
            data = os.pread(handle, min(WINDOW_BYTES, end - at), at)
            if not data:
                raise OSError(f"the file ends at byte {at}")
            self.socket.sendall(data)
            at += len(data)

    def receive_file(self, handle: int, num_bytes: int, *, stall_s: float) -> None:
        """Write received bytes to a file, from its beginning."""
        if num_bytes:
            os.posix_fallocate(handle, 0, num_bytes)
        window = memoryview(bytearray(min(WINDOW_BYTES, num_bytes)))
        at = 0
        while at < num_bytes:
            data = window[: num_bytes - at]
            self.read_into(data, stall_s=stall_s)
            while data:
                done = os.pwrite(handle, data, at)
                data, at = data[done:], at + done


def connect(address: tuple[str, int], *, secret: str, service: str, within_s: float) -> Link:
    """Return a connection to a service of this run; `StrangerError` if it is not one.

    One that is cut before it is proved is made again: too many may have come at once.
    """
    if not secret:
        raise StrangerError("this side knows no secret")
    context = tls_context(secret, service, is_server=False)  # before the other side's time runs
    deadline = time.monotonic() + min(AGAIN_S, within_s)
    while True:
        made = socket.create_connection(address, timeout=within_s)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.settimeout(within_s)
            return Link(context.wrap_socket(made))
        except ssl.SSLCertVerificationError as error:
            made.close()
            raise StrangerError("the other side does not know the secret") from error
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            made.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        except BaseException:
            made.close()
            raise


@dataclass(slots=True)
class _Unproved:
    """A connection that has not proved yet that it knows the secret."""

    socket: ssl.SSLSocket
    peer: str
    since: float


class Service:
    """Serves each connection that knows the secret in a thread of its own, until `close`.

    One thread, which waits for nobody, accepts them and checks the proofs. Before its proof TLS
    keeps at most some 128 KiB of what a connection sends.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[Link], None],
        *,
        secret: Callable[[], str],
        name: str,
        say: Callable[[str], None] = print,
    ) -> None:
        """`serve` ends with its connection; `name` is that which `connect` gives. `secret` must not
        wait, and `say` is called once there are too many connections."""
        self.listener, self.secret, self.name, self.say = listener, secret, name, say
        self._serve = serve
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_files = 2 * PROVED if files == resource.RLIM_INFINITY else files
        self.most_unproved = max(4, min(UNPROVED, self.most_files // 8))
        self.most_proved = max(4, min(PROVED, self.most_files // 2))
        self._unproved: dict[int, _Unproved] = {}
        """By the handle of the socket, the oldest first."""
        self._num_proved, self._was_full = 0, False
        self._counting = threading.Lock()
        self._closing = False
        self._accepts_at: float | None = None
        """When accepting begins again; None while it goes on."""
        self._selector = selectors.DefaultSelector()  # here, as a thread's OSError is nobody's
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that are served go on."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)
        self.listener.close()

    def _run(self) -> None:
        self.listener.setblocking(False)
        with self._selector:
            self._selector.register(self.listener, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in self._selector.select(PAUSE_S):
                    if key.fileobj is self.listener:
                        self._accept()
                    elif key.fd in self._unproved:
                        self._check(key.fd)
                self._forget_late()
            for handle in list(self._unproved):
                self._drop(handle)
            self.listener.close()

    def _accept(self) -> None:
        try:
            made, address = self.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in CLOSED:
                self._closing = True
                return
            # no handle is left: make room, and let those that are served end
            if self._unproved:
                self._drop(next(iter(self._unproved)))
            self._selector.unregister(self.listener)
            self._accepts_at = time.monotonic() + PAUSE_S
            return
        peer = network_of(address[0])
        try:
            if not self._has_room(peer):
                made.close()
                return
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = tls_context(self.secret(), self.name, is_server=True)
            secured = context.wrap_socket(made, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):
            made.close()
            return
        self._unproved[secured.fileno()] = _Unproved(secured, peer, time.monotonic())
        self._selector.register(secured, selectors.EVENT_READ)

    def _has_room(self, peer: str) -> bool:
        """Whether another connection without proof may come; an old one makes room for it."""
        of_peer = [h for h, other in self._unproved.items() if other.peer == peer]
        few = min(UNPROVED_OF_ONE, self.most_unproved // 2)
        if len(of_peer) >= few:
            oldest = of_peer[0]
        elif len(self._unproved) >= self.most_unproved:
            oldest = next(iter(self._unproved))
        else:
            return True
        if time.monotonic() - self._unproved[oldest].since < SAFE_S:
            return False
        self._drop(oldest)
        return True

    def _check(self, handle: int) -> None:
        """Go on with the proof of a connection, and serve it once it is complete."""
        secured = self._unproved[handle].socket
        try:
            secured.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(secured, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(secured, selectors.EVENT_WRITE)
            return
        except (OSError, ValueError):
            self._drop(handle)
            return
        self._selector.unregister(secured)
        del self._unproved[handle]
        try:
            threading.Thread(target=self._attend, args=(Link(secured),), daemon=True).start()
        except RuntimeError:  # no more threads
            secured.close()

    def _attend(self, link: Link) -> None:
        with self._counting:
            self._num_proved += 1
            is_full = self._num_proved > self.most_proved
            is_new = is_full and not self._was_full
            self._was_full |= is_full
        try:
            if is_new:
                self.say(
                    f"warning: {self.name}: {self.most_proved} connections are open, and more are "
                    f"refused: half of `ulimit -n` ({self.most_files}), at most {PROVED}"
                )
            if not is_full:
                self._serve(link)
        finally:
            link.close()
            with self._counting:
                self._num_proved -= 1

    def _forget_late(self) -> None:
        now = time.monotonic()
        for handle, other in list(self._unproved.items()):
            if now - other.since < PROOF_S:
                break
            self._drop(handle)
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def _drop(self, handle: int) -> None:
        dropped = self._unproved.pop(handle)
        self._selector.unregister(dropped.socket)
        dropped.socket.close()
