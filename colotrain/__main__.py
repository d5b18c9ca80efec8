"""Entry point: commands that train start the fork server before all other imports."""

from __future__ import annotations

import os
import sys
from types import TracebackType

TRAIN = ("run", "resume")
STAY_COLD = {"--detach", "--sweep", "--help", "-h"}


def main() -> None:
    open_closed_streams()
    sys.excepthook = print_bug
    if sys.argv[1:2] and sys.argv[1] in TRAIN and not STAY_COLD.intersection(sys.argv):
        from colotrain.launch.server.forkserver import warm_up

        warm_up()
    from colotrain.cli.main import main as carry_out

    carry_out()


def print_bug(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Print a traceback of bounded length: its last line may quote what others wrote."""
    import traceback

    from colotrain.errors import MOST_WRITTEN, shortened

    text = "".join(traceback.format_exception(kind, error, frames))
    sys.stderr.write(shortened(text, MOST_WRITTEN))


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
