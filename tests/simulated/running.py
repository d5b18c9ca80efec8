"""Cases on the simulated device, in processes of their own, and what they left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 600
SMALL = (
    "recipe=llm-tiny",
    "model.args.d_model=32",
    "model.args.num_layers=3",
    "model.args.num_heads=2",
    "model.args.d_hidden=64",
    "data.seq_len=32",
    "train.global_batch=8",
    "train.eval_every=0",
    "train.eval_steps=1",
    "checkpoint.every=0",
    "cluster.memory=8GiB",
    "optim.schedule.name=constant",
    "optim.schedule.warmup_steps=0",
)
"""A plan that takes a second."""
WIDER = (*SMALL, "model.args.d_model=256", "model.args.num_layers=4", "model.args.d_hidden=768")
"""Large enough that what the allocator rounds up does not count."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the engine; `worker.Case` says what its fields mean."""

    name: str
    words: tuple[str, ...]
    on: str = "cuda"
    looks: bool = True
    limit: int | None = None
    run: str = ""
    plant: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class Found:
    """What the ranks of a case saw."""

    folder: Path
    ranks: list[dict[str, Any]] = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        """What rank 0 saw."""
        assert self.error is None, self.ranks[0]["traceback"]
        return self.ranks[0][name]

    @property
    def error(self) -> str | None:
        return next((rank["error"] for rank in self.ranks if "error" in rank), None)

    @property
    def races(self) -> list[str]:
        assert self.error is None, self.error
        return [race for rank in self.ranks for race in rank["races"]]

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Step and name → whole gradient."""
        found: dict[str, Tensor] = torch.load(self.folder / "gradients.pt")
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [f for k, rank, f in self.ranks[0]["events"] if k == kind and rank == 0]


def carry_out(cases: list[Case], folder: Path, guard: Path, *, ranks: int = 1) -> dict[str, Found]:
    """Run `cases` one after the other; name → what was found."""
    return finish(start(cases, folder, guard, ranks=ranks), cases, folder, ranks=ranks)


def start(
    cases: list[Case], folder: Path, guard: Path, *, ranks: int
) -> list[subprocess.Popen[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"cluster.procs_per_node={ranks}"]
    listed = [asdict(case) | {"words": [*case.words, *words]} for case in cases]
    (folder / "cases.json").write_text(json.dumps(listed))
    port = random.SystemRandom().randrange(20_000, 60_000)
    command = [sys.executable, "-m", "tests.simulated.worker", str(folder)]
    common = {"SIMULATED_GUARD": str(guard), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | common | {"FIRST_PORT": str(port), "PYTHONPATH": paths}
    return [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(
    processes: list[subprocess.Popen[str]], cases: list[Case], folder: Path, *, ranks: int
) -> dict[str, Found]:
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = {}
    for case in cases:
        files = [folder / case.name / f"found-{rank}.json" for rank in range(ranks)]
        assert all(file.exists() for file in files), texts[0][-3000:]
        seen = [json.loads(file.read_text()) for file in files]
        found[case.name] = Found(folder / case.name, seen)
    return found


def apart(found: Found, wanted: Found) -> tuple[float, float]:
    """The largest difference of a loss, and of a gradient relative to its norm."""
    assert len(found.losses) == len(wanted.losses)
    assert found.gradients.keys() == wanted.gradients.keys()
    losses = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    gradients = [
        ((found.gradients[name] - like).norm() / like.norm().clamp(min=1e-12)).item()
        for name, like in wanted.gradients.items()
    ]
    return losses, max(gradients)
