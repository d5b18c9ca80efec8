"""Generated events of runs that have everything a dashboard can show."""

from __future__ import annotations

import math
from typing import Any

from colotrain.events.event import Event
from tests.unit.events.test_view import MIB, launcher, step, worker

STATUSES = {
    "embed.weight": "frozen",
    "blocks.0.attention.weight": "trained",
    "blocks.0.mlp.weight": "trained",
    "blocks.1.attention.weight": "nonfinite",
    "blocks.1.mlp.weight": "trained",
    "blocks.2.mlp.weight": "zero",
    "head.weight": "unused",
}
REASONS = {
    "embed.weight": "embed*",
    "blocks.1.attention.weight": "its norm is nan",
    "blocks.2.mlp.weight": "every element is zero",
    "head.weight": "no path from the loss",
}
NAMES = list(STATUSES)


STAGES = {"embed.weight": [0, 1], "blocks.0.attention.weight": [0], "blocks.0.mlp.weight": [0]}
"""Stages of parameters in a pipeline of two; all others are on the last."""


def parameters(
    t: float = 100.7, *, attempt: int = 0, names: list[str] = NAMES, staged: bool = False
) -> Event:
    more = {"stages": {name: STAGES.get(name, [1]) for name in names}} if staged else {}
    return worker(
        "parameters",
        t,
        attempt=attempt,
        names=names,
        shapes=[[4, 8]] * len(names),
        dtypes=["float32"] * len(names),
        aliases={"embed.weight": ["tied.weight"]},
        **more,
    )


def gradients(
    number: int, *, t: float | None = None, attempt: int = 0, scale: float = 1.0, **changes: Any
) -> Event:
    """The norm of parameter i in step n is scale · (i + 1) / n where it is trained."""
    norms = [
        scale * (i + 1) / number if status == "trained" else 0.0
        for i, status in enumerate(STATUSES.values())
    ]
    norms[NAMES.index("blocks.1.attention.weight")] = math.nan
    columns = {
        "status": list(STATUSES.values()),
        "reason": REASONS,
        "norm": norms,
        "rms": [norm / 4 for norm in norms],
        "max_abs": [norm / 2 for norm in norms],
        "zero_fraction": [1.0 if norm == 0 else 0.0 for norm in norms],
        "nonfinite": [32 if norm != norm else 0 for norm in norms],
        "update_ratio": [norm / 100 for norm in norms],
        "global_norm": 2.5,
        "clipped_to": 1.0,
    }
    at = 100.1 + number if t is None else t
    return worker("gradients", at, attempt=attempt, step=number, **columns | changes)


def staged_run(*, num_steps: int = 30) -> list[Event]:
    """Four ranks in two pipeline stages, of which the first waits longer; rank 3 is slow."""
    events = [launcher("launch", 99.0, world_size=4, pid=1, host="h"), parameters(staged=True)]
    for rank in range(4):
        own, wait_s = rank // 2, 0.1 if rank == 3 else (0.4, 0.2)[rank // 2]
        events.append(worker("started", 100.5, rank=rank, world_size=4, step=0, stage=own))
        for n in range(1, num_steps + 1):
            first = {"step_s": 8.0, "wait_s": 7.0} if n == 1 else {"step_s": 1.0, "wait_s": wait_s}
            events.append(step(n, rank=rank, peak=(300 - 10 * rank) * MIB, compute_s=0.9, **first))
    return sorted(events, key=lambda event: event.t)


def rich_run(*, num_steps: int = 40, num_ranks: int = 4) -> list[Event]:
    """A running run in which rank 2 is slow, with gradient records, evaluations and a save."""
    ranks = range(num_ranks)
    events = [launcher("launch", 99.0, world_size=num_ranks, pid=1, host="h")]
    events += [worker("started", 100.5, rank=r, world_size=num_ranks, step=0) for r in ranks]
    events += [parameters(), worker("peak_flops", 100.8, flops_per_s=1e6, what="fp32 matmul")]
    for n in range(1, num_steps + 1):
        for rank in ranks:
            timing = {"compute_s": 0.6 if rank == 2 else 0.3, "reduce_s": 0.1, "optimizer_s": 0.05}
            peak = (300 + 10 * rank) * MIB
            events.append(step(n, rank=rank, peak=peak, step_s=0.8, data_s=0.05, **timing))
        if n % 10 == 0:
            events += [gradients(n), worker("eval", 100.2 + n, step=n, loss=1.1 / n)]
    events.append(worker("checkpoint", 120.3, step=20, path="/c/20", seconds=0.4))
    events.append(launcher("restart", 99.5, attempt=0, cause="rank 1 was killed by SIGKILL"))
    return events
