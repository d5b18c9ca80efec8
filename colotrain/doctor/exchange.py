"""A measured all-reduce between ranks, which are processes that connect to one TCPStore.

A rank prints its result as one line of JSON.
"""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from colotrain.addresses import LOOPBACK
from colotrain.doctor.finding import Environment, Finding, fail, ok, size, warn
from colotrain.dotted import new_python

LIMIT_S = 90.0
TIMEOUT = datetime.timedelta(seconds=LIMIT_S * 2 / 3)
NUM_BYTES = 16 << 20
ROUNDS = 5
SLOW_BYTES_PER_S = 20e6


def check_exchange(env: Environment) -> Iterator[Finding]:
    """Check an all-reduce between two ranks on this machine."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    yield from judge("all-reduce", run_two(port), "2 ranks of this machine")


def judge(check: str, answer: dict[str, object] | str, who: str) -> Iterator[Finding]:
    """Turn the answer of rank 0, or the reason why there is none, into a finding."""
    if isinstance(answer, str):
        fix = "see the checks of names, loopback, ports and limits above, and firewalls"
        yield fail(check, f"{who} cannot exchange ({answer})", fix)
        return
    speed = float(str(answer["bytes_per_s"]))
    text = f"{size(speed)}/s between {who}, {size(NUM_BYTES)} at once"
    if speed < SLOW_BYTES_PER_S:
        yield warn(check, text, "is the machine or the network busy? see cpu and interconnect")
    else:
        yield ok(check, text)


def run_two(port: int) -> dict[str, object] | str:
    """Run two ranks as local processes, with a store at `port`; return rank 0's answer, or why
    there is none."""
    processes = [
        subprocess.Popen(
            [*new_python(), "-m", "colotrain.doctor.exchange", str(port), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    deadline, outs = time.monotonic() + LIMIT_S, list[tuple[str, str]]()
    try:
        for process in processes:
            outs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:.0f} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    try:
        answer: dict[str, object] = json.loads(outs[0][0].strip().splitlines()[-1])
        return answer
    except (ValueError, IndexError):
        errors = [err.strip().splitlines()[-1] for _, err in outs if err.strip()]
        return errors[0] if errors else "a rank ended without an answer"


def time_all_reduce(store: Any, host: str, rank: int, world: int) -> dict[str, object]:
    """Time an all-reduce between ranks that share `store`, a `torch.distributed.Store` on `host`.

    All ranks must call. Raises torch's exceptions.
    """
    import torch
    import torch.distributed as dist

    from colotrain.engine.comms.process import choose_interface

    choose_interface(host)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    tensor = torch.ones(NUM_BYTES // 4)
    dist.all_reduce(tensor)
    started = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
    seconds = (time.perf_counter() - started) / ROUNDS
    dist.barrier()
    dist.destroy_process_group()
    return {"bytes_per_s": NUM_BYTES / seconds, "seconds": seconds}


def main(words: list[str]) -> int:
    from colotrain.engine.comms.process import loopback_store

    port, rank = map(int, words)
    store = loopback_store(port, is_master=rank == 0, timeout=TIMEOUT)
    print(json.dumps(time_all_reduce(store, LOOPBACK, rank, 2)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
