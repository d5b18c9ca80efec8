"""Entry point: commands that train start the fork server before all other imports."""

from __future__ import annotations

import os
import sys

TRAIN = ("run", "resume")
STAY_COLD = {"--detach", "--sweep", "--help", "-h"}


def main() -> None:
    open_closed_streams()
    if sys.argv[1:2] and sys.argv[1] in TRAIN and not STAY_COLD.intersection(sys.argv):
        from colotrain.launch.server.forkserver import warm_up

        warm_up()
    from colotrain.cli.main import main as carry_out

    carry_out()


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
