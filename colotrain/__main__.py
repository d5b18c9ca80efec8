"""Entry point: commands that train start the fork server before all other imports."""

from __future__ import annotations

import sys

TRAIN = ("run", "resume")
STAY_COLD = {"--detach", "--sweep", "--help", "-h"}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in TRAIN and not STAY_COLD.intersection(sys.argv):
        from colotrain.launch.server.forkserver import warm_up

        warm_up()
    from colotrain.cli.main import main as carry_out

    carry_out()


if __name__ == "__main__":
    main()
