"""Python commands without the wait for their imports: each is a fork of a process that is warm.

`python tests/warm.py LISTENER SERVERS MODULES…` imports the modules, then serves: whoever
connects says what to run (`Command`), and is told the process id of a fork that runs it, and later
its exit code. A fork has the folder, environment, streams and exit that it would have had as a new
Python. What Python reads once, as it starts (`PYTHONUNBUFFERED`, `GLIBC_TUNABLES`), it has of the
warm process, and so it has its process group.

Run by path, a warm process has not imported the package `tests`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, NoReturn

MESSAGE_BYTES = 1 << 17
MAX_FDS = 16
HIGH_FD = 200
"""Above every number that a command's own files could have."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A Python to be."""

    arguments: list[str]
    """After the interpreter's own name: `-m MODULE ARGUMENTS…`, or `-c CODE`."""
    cwd: str
    environment: dict[str, str]


def ask(address: str, command: Command, files: Mapping[int, int]) -> tuple[int, socket.socket]:
    """Have a command forked: its process id, and where its exit code will be told.

    `files` are those that it inherits, by the number that each shall have there.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(address_of(address))
    message = json.dumps(asdict(command) | {"numbers": list(files)}).encode()
    assert len(message) < MESSAGE_BYTES
    socket.send_fds(client, [message], list(files.values()))
    return told(client), client


def told(client: socket.socket) -> int:
    """The next number that the warm process tells."""
    message = client.recv(32)
    if not message:
        raise ConnectionError("the warm process has ended")
    return int(message)


def address_of(name: str) -> str:
    """In Linux' abstract name space, which leaves no files."""
    return f"\0{name}"


class Warm:
    """Forks commands until its standard input ends, as that does with the process that made it."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        self.running: dict[int, tuple[int, socket.socket]] = {}
        """Process id and client of each fork, by pidfd."""

    def serve(self) -> tuple[Command, dict[int, int]]:
        """Returns in forks only: what to be, with which files."""
        while True:
            for key, _ in self.selector.select():
                if key.fd == 0:
                    self._end()
                elif key.fd in self.running:
                    self._tell(key.fd)
                elif (found := self._fork()) is not None:
                    return found

    def _fork(self) -> tuple[Command, dict[int, int]] | None:
        client, _ = self.listener.accept()
        message, fds, _, _ = socket.recv_fds(client, MESSAGE_BYTES, MAX_FDS)
        fields = json.loads(message)
        files = dict(zip(fields.pop("numbers"), fds, strict=True))
        pid = os.fork()
        if pid == 0:
            client.close()
            self._close()
            return Command(**fields), files
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self.running[pidfd] = pid, client
        self.selector.register(pidfd, selectors.EVENT_READ)
        _send(client, pid)
        return None

    def _tell(self, pidfd: int) -> None:
        """That a fork has ended, and how."""
        pid, client = self.running.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        _send(client, os.waitstatus_to_exitcode(status))
        client.close()

    def _close(self) -> None:
        self.selector.close()
        self.listener.close()
        for pidfd, (_, client) in self.running.items():
            os.close(pidfd)
            client.close()

    def _end(self) -> None:
        for pid, _ in self.running.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        client.send(b"%d" % number)


def be(command: Command, files: Mapping[int, int], python_path: list[str]) -> NoReturn:
    """Be the command, and exit as it would, but for the destructors of all that was imported."""
    try:
        _run(command, files, python_path)
        code: Any = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, here or by its reader
            stream.flush()
    os._exit(code)


def _run(command: Command, files: Mapping[int, int], python_path: list[str]) -> None:
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for number, fd in files.items()}
    for fd in files.values():
        os.close(fd)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.environment)
    how, what, *arguments = command.arguments
    first = os.getcwd() if how == "-m" else ""
    sys.path[:] = [first, *_python_path(), *python_path]
    sys.argv[:] = [how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(what, main.__dict__)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class Server(forkserver.ForkServer):
    """multiprocessing's server, forked from a warm process.

    It serves the workers of one launcher, as it always does, and ends with it.
    """

    def __init__(self, warm: str) -> None:
        super().__init__()
        self._warm = warm

    def ensure_running(self) -> None:
        with self._lock:
            resource_tracker.ensure_running()
            if self._forkserver_alive_fd is None:
                self._start()

    def _start(self) -> None:
        address = connection.arbitrary_address("AF_UNIX")
        alive_r, alive_w = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            code = (
                f"from multiprocessing.forkserver import main; main(3, 4, {self._preload_modules})"
            )
            command = Command(arguments=["-c", code], cwd=os.getcwd(), environment=dict(os.environ))
            files = {0: 0, 1: 1, 2: 2, 3: listener.fileno(), 4: alive_r}
            _, client = ask(self._warm, command, files)
        os.close(alive_r)
        client.close()
        self._forkserver_address, self._forkserver_alive_fd = address, alive_w


def take_workers_from(warm: str) -> None:
    """This process, and those that are forked from it, have a `Server` in place of their own."""
    server = Server(warm)
    forkserver._forkserver = server
    for name in forkserver.__all__:
        setattr(forkserver, name, getattr(server, name))


def rehearse() -> None:
    """Run what commands run before they launch: the first time fills caches of libraries.

    Half of a short command's time went into them.
    """
    cli = importlib.import_module("colotrain.cli.main")
    resolving = importlib.import_module("colotrain.runs.resolving")
    dependencies = importlib.import_module("colotrain.planner.dependencies")
    before, environment = os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.chdir(folder)
        os.environ["COLOTRAIN_CACHE"] = folder
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            cli.guarded(["runs"])
            resolving.resolve_config(["recipe=llm-tiny"])
        os.chdir(before)
    os.environ.clear()
    os.environ.update(environment)
    dependencies._loaded_before.cache_clear()
    assert threading.active_count() == 1, "a fork would lack its threads"


def keep_libraries() -> None:
    """Let forks end without undoing torch's libraries one by one, a fifth of a second each time."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        known = finalizer.peek()
        if known is not None and known[1].__module__ == "torch.library":
            finalizer.detach()


def main(fd: str, servers: str, *modules: str) -> None:
    beside = _python_path()
    python_path = [path for path in sys.path[1:] if path not in beside]
    sys.path[:] = [*beside, *python_path]  # without this folder
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module)
    if servers:
        rehearse()
        take_workers_from(servers)
    keep_libraries()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(fd)) as listener:
        command, files = Warm(listener).serve()
    be(command, files, python_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
