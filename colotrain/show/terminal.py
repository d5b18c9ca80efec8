"""Terminal of a live view: an alternate screen without cursor, and keys one by one.

However the view ends, also by SIGTERM or SIGHUP, the terminal is restored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType
from typing import Any

from rich.console import Console, RenderableType

ENDINGS = (signal.SIGTERM, signal.SIGHUP)

_Handler = Callable[[int, FrameType | None], None]


def is_live(console: Console) -> bool:
    """Whether to use colour, cursor movement and redraws: only on a capable terminal."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


class Terminal:
    """Context manager for the main thread; `leave` may be called before its end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.active = False
        self._keyboard = _keyboard()
        self._settings: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._drawing = self._asked = False

    def __enter__(self) -> Terminal:
        self._enter()
        for number in (*ENDINGS, signal.SIGTSTP):
            if signal.getsignal(number) is signal.SIG_DFL:
                handler = self._suspend if number == signal.SIGTSTP else self._end
                self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Restore the terminal and the signal handlers."""
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def yield_to(self, *numbers: signal.Signals) -> None:
        """Restore the terminal as soon as one of these signals arrives that has a handler.

        The handler runs afterwards, and may end the process so that no later restore is possible.
        """
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, self._before(handler))

    def _before(self, handler: Callable[[int, FrameType | None], Any]) -> _Handler:
        def leave_first(number: int, frame: FrameType | None) -> None:
            if self._drawing and not self._asked:
                self._asked = True  # not while a frame is being drawn
            else:
                self._restore()
            handler(number, frame)

        return leave_first

    def draw(self, frame: RenderableType) -> None:
        """Show `frame` on the whole screen."""
        if not self.active:
            return
        self._drawing = True
        self.console.update_screen(frame)
        self._drawing = False
        if self._asked:
            self._restore()

    def keys(self, timeout_s: float = 0.0) -> str:
        """Return the keys pressed; wait at most `timeout_s` for the first one."""
        if self._keyboard is None or not self.active:
            select.select([], [], [], timeout_s)
            return ""
        ready, _, _ = select.select([self._keyboard], [], [], timeout_s)
        with contextlib.suppress(OSError):
            return os.read(self._keyboard, 64).decode("ascii", "ignore") if ready else ""
        return ""

    def _enter(self) -> None:
        if self._keyboard is not None:
            self._settings = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSANOW)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)
        self.active = True

    def _restore(self) -> None:
        if not self.active:
            return
        self.active = False
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        if self._keyboard is not None and self._settings is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._settings)

    def _end(self, number: int, _: FrameType | None) -> None:
        """Die of the signal, as a process without the view does."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell until `fg`."""
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # the process stops here
        signal.signal(number, self._suspend)
        self._enter()


def _keyboard() -> int | None:
    """Return the descriptor of stdin if it is a terminal."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return number if os.isatty(number) else None
