"""Notifications: a command or a webhook is told when a run finished, failed, stopped or restarted.

They are sent on a thread of the launcher. One that is missing, fails or hangs causes a warning, but
never delays a step or changes how the run ends. Values of environment variables that the plan
refers to are read when they are needed and stand in no message.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.events.event import Event
from colotrain.events.kinds import LaunchEnded, Restart
from colotrain.events.log import json_safe
from colotrain.events.view import RunView
from colotrain.rundir import RunDir
from colotrain.show.thread_warnings import ThreadWarnings
from colotrain.spec.exit_codes import PREEMPTED
from colotrain.spec.observing import NotifyPlan, unset_variables, with_variables
from colotrain.spec.plan import RunPlan

CLOSE_S = 20.0
"""Seconds that the end of a run waits for notifications."""
COMMAND_S = 15.0
"""Seconds after which a command is killed."""
ANSWER_S = 5.0
"""Seconds that a webhook may take to answer."""
PAUSES_S = (1.0, 2.0)
"""Seconds before each further attempt to reach a webhook."""
TEMPORARY = (408, 425, 429)
"""HTTP statuses besides 5xx after which the same request may succeed later."""
MOST_WAITING = 1000
"""Notifications that wait for a slow command or webhook; later ones are dropped."""
STATUSES = {"preempted": "stopped", "interrupted": "stopped"}
"""Status of a run → what is told; others have the same name."""


class NotSent(Exception):
    """A notification was not delivered; the message holds nothing secret."""


class Notifier:
    """Tells what becomes of a run. Use as a context manager around preparation and launch."""

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        self._plan, self._rundir, self._settings = plan, rundir, plan.observe.notify
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._warnings = ThreadWarnings()
        self._thread = threading.Thread(target=self._work, name="notifications", daemon=True)
        self._running: subprocess.Popen[bytes] | None = None
        self._ended = False

    def __enter__(self) -> Notifier:
        if self._settings is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not self._ended:  # before there were workers
            stopped = isinstance(error, KeyboardInterrupt) or (
                isinstance(error, ColotrainError) and error.exit_code == PREEMPTED
            )
            reason = error.problem if isinstance(error, ColotrainError) else type(error).__name__
            self._tell("stopped" if stopped else "failed", reason, RunView())
        self.close()

    def take(self, events: Sequence[Event], view: RunView) -> list[Event]:
        """Queue what `events` say without waiting; return warnings as events of kind `note`."""
        for event in events:
            if event.kind == Restart.KIND:
                self._tell("restarted", Restart.of(event).cause, view)
            elif event.kind == LaunchEnded.KIND:
                self._ended, ended = True, LaunchEnded.of(event)
                told = STATUSES.get(ended.status, ended.status)
                self._tell(told, ended.cause or view.cause or "", view)
        return self._warnings.take()

    def close(self) -> list[Event]:
        """Let the notifications that wait be sent; return warnings."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._warnings.add(
                    f"observe.notify was left behind: not done after {CLOSE_S:.0f} s"
                )
                if (running := self._running) is not None:
                    _kill(running)
        return self._warnings.take()

    def _tell(self, status: str, reason: str, view: RunView) -> None:
        settings = self._settings
        if settings is None or status not in settings.events:
            return
        if self._waiting.qsize() > MOST_WAITING:
            return
        self._waiting.put(message_of(status, reason, view, self._plan, self._rundir))

    def _work(self) -> None:
        """Body of the thread."""
        assert self._settings is not None
        while (message := self._waiting.get()) is not None:
            for what, send in (("command", self._run), ("url", self._post)):
                try:
                    send(self._settings, message)
                except NotSent as problem:
                    self._warnings.add(
                        f"observe.notify ({what}): {message['status']} was not told: {problem}"
                    )
                except Exception as error:  # its text may hold what a variable holds
                    kind = type(error).__name__
                    self._warnings.add(
                        f"observe.notify ({what}): {message['status']} was not told: {kind}"
                    )

    def _run(self, settings: NotifyPlan, message: dict[str, Any]) -> None:
        """Run the command; its output goes to the run's `logs/notify.log`."""
        if not settings.command:
            return
        words = list(settings.command)
        if not settings.shell:  # a shell reads its variables itself
            words = [_expanded(word) for word in words]
        variables = {f"COLOTRAIN_{key.upper()}": _as_text(v) for key, v in message.items()}
        with self._rundir.append(self._rundir.notify_log) as log:
            process = subprocess.Popen(
                words[0] if settings.shell else words,
                shell=settings.shell,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C is for the run
            )
        self._running = process
        try:
            process.communicate(_encoded(message), timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            raise NotSent(f"it took longer than {COMMAND_S:.0f} s and was killed") from None
        finally:
            self._running = None
        if process.returncode:
            raise NotSent(f"exit code {process.returncode}; see {self._rundir.notify_log}")

    def _post(self, settings: NotifyPlan, message: dict[str, Any]) -> None:
        """Send the message, again after a failure that may pass."""
        if settings.url is None:
            return
        url = _expanded(settings.url)
        for pause_s in (*PAUSES_S, None):
            problem, temporary = _try_to_post(url, _encoded(message))
            if problem is None:
                return
            if pause_s is None or not temporary:
                raise NotSent(problem)
            time.sleep(pause_s)


def message_of(
    status: str, reason: str, view: RunView, plan: RunPlan, rundir: RunDir
) -> dict[str, Any]:
    """Return what is told, as plain data for JSON; numbers that are not known are None."""
    loss = view.loss[-1][1] if view.loss else None
    at = f" at step {view.steps} of {plan.train.max_steps}"
    of_loss = "" if loss is None else f", loss {loss:.4g}"
    because = f": {reason}" if reason else ""
    found: dict[str, Any] = json_safe(
        {
            "run": rundir.name,
            "status": status,
            "step": view.steps,
            "max_steps": plan.train.max_steps,
            "loss": loss,
            "reason": reason or None,
            "restarts": view.restarts,
            "run_dir": str(rundir.path),
            "host": socket.gethostname(),
            "time": time.time(),
            "text": f"{rundir.name} {status}{at}{of_loss}{because}",
        }
    )
    return found


def check_notify(plan: RunPlan) -> None:
    """Raise `ConfigError` where this machine lacks a program or variable of `observe.notify`."""
    settings, problems = plan.observe.notify, list[Problem]()
    if settings is None:
        return
    words = () if settings.shell else settings.command
    texts = [("command", word) for word in words] + [("url", settings.url or "")]
    for key, text in texts:
        for name in unset_variables(text):
            expected, fix = f"the environment variable {name}, which is not set", f"export {name}"
            problems.append(Problem(key=f"observe.notify.{key}", expected=expected, fix=fix))
    if words and not problems and shutil.which(_expanded(words[0])) is None:
        key, fix = "observe.notify.command", "name a program on PATH, or its whole path"
        expected = "a program that can be run here"
        problems.append(Problem(key=key, value=words[0], expected=expected, fix=fix))
    if settings.url and not problems and not _expanded(settings.url).startswith(SCHEMES):
        expected, fix = "a URL that begins with https:// or http://", "correct the variable"
        problems.append(Problem(key="observe.notify.url", expected=expected, fix=fix))
    if problems:
        raise ConfigError(problems)


SCHEMES = ("https://", "http://")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the message somewhere else, or as a GET without it."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _try_to_post(url: str, body: bytes) -> tuple[str | None, bool]:
    """Return what went wrong (None: nothing) and whether it may pass; never the URL itself."""
    if not url.startswith(SCHEMES):  # urllib would open file:// too
        return "its variable holds no URL with https:// or http://", False
    request = urllib.request.Request(url, data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", "colotrain")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=ANSWER_S):
            return None, False
    except urllib.error.HTTPError as error:
        with suppress(OSError):
            error.close()
        return f"HTTP status {error.code}", error.code >= 500 or error.code in TEMPORARY
    except urllib.error.URLError as error:
        return _reason(error.reason), True
    except (OSError, http.client.HTTPException) as error:
        return _reason(error), not isinstance(error, http.client.InvalidURL)


def _reason(error: object) -> str:
    """Return the system's text for an error, else its type: other texts may hold the URL."""
    own = type(error).__module__ in ("builtins", "socket")
    if own and isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return type(error).__name__


def _expanded(text: str) -> str:
    if unset := unset_variables(text):
        raise NotSent(f"the environment variable {unset[0]} is not set")
    return with_variables(text)


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _as_text(value: Any) -> str:
    """Return a value as an environment variable can hold it."""
    return "" if value is None else str(value).replace("\0", "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
