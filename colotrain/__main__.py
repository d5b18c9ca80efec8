"""Entry point: commands that train start the fork server before all other imports."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType, TracebackType

from colotrain.spec.exit_codes import INTERRUPTED

TRAIN = ("run", "resume")
STAY_COLD = {"--detach", "--sweep", "--help", "-h"}


def main() -> None:
    """Carry out the command line, and exit with its code: from here on SIGINT makes it 130.

    A SIGINT during the imports ends the process at once, as nothing has to be undone yet: what
    Python raises while it imports may get lost there. An ignored SIGINT stays ignored.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = INTERRUPTED
    try:
        if interruptible:
            signal.signal(signal.SIGINT, leave)
            # the last exit function: Python's default action would come back after it
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        open_closed_streams()
        sys.excepthook = print_bug
        if sys.argv[1:2] and sys.argv[1] in TRAIN and not STAY_COLD.intersection(sys.argv):
            from colotrain.launch.server.forkserver import warm_up

            warm_up()
        from colotrain.cli.main import main as carry_out

        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = carry_out()
    except KeyboardInterrupt:
        pass
    if interruptible:
        end_with(code)
    sys.exit(code)


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once as interrupted."""
    forkserver = sys.modules.get("colotrain.launch.server.forkserver")
    if end_server := getattr(forkserver, "end_server", None):  # it would import torch to the end
        end_server()
    os._exit(INTERRUPTED)


def end_with(code: int) -> None:
    """Let no SIGINT change the exit code any more; Python's end may take a while."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    # `python -m` dies of SIGINT at its end if one interrupted the last `exec` of a string, which
    # imports of dataclasses are full of, though the interruption was handled
    exec("")


def print_bug(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Print a traceback of bounded length, without control characters that others wrote."""
    import traceback

    from colotrain.errors import MOST_WRITTEN, shortened

    text = "".join(traceback.format_exception(kind, error, frames))
    shown = (c if c.isprintable() or c == "\n" else " " for c in shortened(text, MOST_WRITTEN))
    sys.stderr.write("".join(shown))


def open_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed.

    Files would get its number, here and in every process that is started from here.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()
