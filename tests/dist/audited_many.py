"""Run many scripts under observation, in forks of one process that has imported torch.

`python audited_many.py FOLDER CASES` with colotrain's hooks installed. CASES is a JSON list of
[name, number of ranks, script, its arguments…]; each leaves what its processes observed in
FOLDER/name.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.utils.checkpoint

LONGEST_S = 60


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def main() -> None:
    folder = Path(sys.argv[1])
    for name, ranks, *argv in json.loads(sys.argv[2]):
        rundir = folder / name
        (rundir / "audit").mkdir(parents=True)
        (rundir / "events").mkdir()
        os.environ["COLOTRAIN_AUDIT"] = str(rundir)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        children = []
        for rank in range(ranks):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            child = os.fork()
            if not child:
                signal.alarm(LONGEST_S)
                sys.argv = argv
                runpy.run_path(argv[0], run_name="__main__")
                atexit._run_exitfuncs()
                os._exit(0)  # taking torch apart would take a second
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
