"""Run `audited.py` many times under observation, in forks of one process that has imported torch.

`python audited_many.py FOLDER FAULT/FRAMEWORK…` with colotrain's hooks installed; each case leaves
what its processes observed in FOLDER/FAULT-FRAMEWORK.
"""

import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.utils.checkpoint

SCRIPT = str(Path(__file__).with_name("audited.py"))
RANKS = {"plain": 1, "ddp": 2, "fully_shard": 2}
LONGEST_S = 60


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def main() -> None:
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        fault, framework = case.split("/")
        rundir = folder / f"{fault}-{framework}"
        (rundir / "audit").mkdir(parents=True)
        (rundir / "events").mkdir()
        os.environ["COLOTRAIN_AUDIT"] = str(rundir)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        children = []
        for rank in range(RANKS[framework]):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS[framework])}
            child = os.fork()
            if not child:
                signal.alarm(LONGEST_S)
                sys.argv = [SCRIPT, fault, *(["fully_shard"] if framework == "fully_shard" else [])]
                runpy.run_path(SCRIPT, run_name="__main__")
                return
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
