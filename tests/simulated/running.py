"""Cases on the simulated device, in processes of their own, and what they left."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from colotrain.spec.elastic import ROUND_KEY
from tests import processes
from tests.simulated.case import Case

TIMEOUT_S = 1500
"""Seconds for all cases of a module, which take 200 alone on quiet cores, beside other tests."""
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


WORKER = "tests.simulated.worker"


def environment(guard: Path) -> dict[str, str]:
    """What a worker needs to find as its Python starts."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "SIMULATED_GUARD": str(guard),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",  # the device has no cuBLAS
    }


@functools.cache
def warm(guard: Path) -> str:
    """Address of the process that workers are forked from: each would take 7 s for its imports."""
    return processes.start("simulated", [WORKER], environment=environment(guard))


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
    return Ranks(cases, folder, guard, ranks=ranks).finish()


class Ranks:
    """The processes that carry out `cases`; in a store for each case they find each other."""

    def __init__(self, cases: list[Case], folder: Path, guard: Path, *, ranks: int) -> None:
        self.cases, self.folder = cases, folder
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"cluster.procs_per_node={ranks}"]
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True) for _ in cases]
        told = [asdict(case) | {"words": [*case.words, *words]} for case in cases]
        ports = [store.port for store in self.stores]
        (folder / "cases.json").write_text(json.dumps([*zip(ports, told, strict=True)]))
        common = environment(guard) | {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            ROUND_KEY: "of the simulation",
        }
        self.processes = [
            processes.Process(
                warm(guard),
                ["-m", WORKER, str(folder)],
                cwd=Path.cwd(),
                environment=common | {"RANK": str(rank)},
                log=self._log(rank),
            )
            for rank in range(ranks)
        ]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def finish(self) -> dict[str, Found]:
        """Name → what was found, when every process has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for process in self.processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self.processes:
                process.kill()
        found = {}
        for case in self.cases:
            folder, ranks = self.folder / case.name, range(len(self.processes))
            files = [folder / f"found-{rank}.json" for rank in ranks]
            missing = [rank for rank in ranks if not files[rank].exists()]
            assert not missing, self._log(missing[0]).read_text()[-3000:]
            found[case.name] = Found(folder, [json.loads(file.read_text()) for file in files])
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
