"""Processes of `python -m colotrain`, forked from a warm one that lasts as long as this process."""

from __future__ import annotations

import functools
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import colotrain
from colotrain.launch.server import forkserver as workers
from tests import warm

NEVER_IMPORTED = ("colotrain.__main__", workers.FIRST, workers.LAST)
"""By launchers: each runs something, or changes the process."""
OF_MODELS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
"""What models of transformers import: 1.5 s of each worker."""


class Process:
    """A command that is forked from a warm process; used as a `subprocess.Popen` of text.

    Both streams go to the file `log`, if there is one.
    """

    def __init__(
        self,
        address: str,
        arguments: list[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        command = warm.Command(arguments=arguments, cwd=str(cwd), environment=dict(environment))
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        if log is not None:
            for end in (out_end, err_end):
                os.close(end)
            out_end = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            err_end = os.dup(out_end)
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = {0: nothing, 1: out_end, 2: err_end}
        self.pid, self._status = warm.ask(address, command, files)
        for fd in files.values():
            os.close(fd)

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = warm.told(self._status)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends: other processes may have them longer than this one."""
        texts = ["", ""]

        def read(number: int) -> None:
            stream = (self.stdout, self.stderr)[number]
            if not stream.closed:
                texts[number] = stream.read()
                stream.close()

        readers = [threading.Thread(target=read, args=(n,), daemon=True) for n in (0, 1)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_warm: list[subprocess.Popen[bytes]] = []
"""The warm processes, which end when nobody holds their standard input any more."""


@functools.cache
def launchers() -> str:
    """Address of the process that has imported what commands and tests import.

    The workers of a launcher are not forked from it, but from one that knows less.
    """
    names = [module.name for module in pkgutil.walk_packages(colotrain.__path__, "colotrain.")]
    ours = [name for name in names if name not in NEVER_IMPORTED]
    agent = "torch.distributed.elastic.agent.server.local_elastic_agent"
    return start("launchers", [*ours, agent, "pytest", *OF_MODELS], servers=servers())


@functools.cache
def servers() -> str:
    """Address of the process that has imported what workers import, and is set up as theirs."""
    return start("servers", [*workers.PRELOAD, *OF_MODELS], environment=workers.environment())


def start(
    name: str,
    modules: list[str],
    *,
    servers: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Start a warm process; who asks it for a command before it is warm waits."""
    address = f"colotrain-{os.getpid()}-{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(warm.address_of(address))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, warm.__file__, str(listener.fileno()), servers, *modules],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for who runs the tests
        )
    _warm.append(process)
    return address
