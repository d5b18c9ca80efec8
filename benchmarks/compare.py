"""colotrain's plugins beside the systems that people use, on one workload. `make bench`

Every system is a process tree of its own, started as its users start it. Within a round all
systems run one after the other; what is compared are the ratios to plain DDP of the same round.
Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from processes import carry_out
from workload import LR, MODEL, SEQ_LEN, Cell

from colotrain.observe.events import EventReader
from colotrain.observe.fold import follow
from colotrain.rundir import RunDir

PEERS = Path(__file__).parent / "peers"
RUN_TIMEOUT_S = 600
CELLS = (
    Cell(ranks=2, micro_batch=1, accumulation=1),
    Cell(ranks=2, micro_batch=4, accumulation=1),
    Cell(ranks=2, micro_batch=1, accumulation=4),
    Cell(ranks=2, micro_batch=4, accumulation=4),
    Cell(ranks=4, micro_batch=1, accumulation=1),
)


@dataclass(frozen=True)
class System:
    """Something that trains. `stage` says whom it is compared with: 0 is replicas."""

    name: str
    variant: str
    stage: int
    script: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant}"


SYSTEMS = [
    System("torch", "ddp", 0, "plain.py"),
    System("torch", "ddp+zero", 1, "plain.py"),
    System("torch", "fully_shard-zero2", 2, "plain.py"),
    System("torch", "fully_shard-zero3", 3, "plain.py"),
    System("accelerate", "ddp", 0, "with_accelerate.py"),
    # Accelerate 1.15 does not shard on CPU: with an FSDP plugin it trains replicas all the same
    System("lightning", "ddp", 0, "with_lightning.py"),
    System("lightning", "fsdp2-zero2", 2, "with_lightning.py"),
    System("lightning", "fsdp2-zero3", 3, "with_lightning.py"),
    System("deepspeed", "zero0", 0, "with_deepspeed.py"),
    System("deepspeed", "zero1", 1, "with_deepspeed.py"),
    System("deepspeed", "zero2", 2, "with_deepspeed.py"),
    System("deepspeed", "zero3", 3, "with_deepspeed.py"),
    System("colotrain", "zero1", 1),
    System("colotrain", "zero2", 2),
    System("colotrain", "zero3", 3),
    System("colotrain", "fsdp-hybrid", 3),
    System("colotrain", "gemini", 3),
]


@dataclass(frozen=True)
class Measured:
    """One run of one system."""

    tokens_per_s: float
    """Of the median step, without the first two."""
    peak_bytes: int
    """Resident, of the rank that has the most."""
    first_step_s: float
    """From the start of the command to the end of the first step."""
    planned_bytes: int | None = None
    """The peak that colotrain's plan predicts."""


def measure(system: System, cell: Cell, steps: int) -> Measured:
    """Run a system once; raises `RuntimeError` with its last words where it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder)
        started = time.time()
        words, environment = command(system, cell, steps, out), environment_of(cell)
        carry_out(words, out, environment=environment, timeout_s=RUN_TIMEOUT_S)
        planned = None
        if system.name == "colotrain":
            planned = RunDir(out / "runs" / "bench").plan().memory.total
            ends, peak = read_colotrain(out)
        else:
            ends, peak = read_peer(out, cell)
    gaps = [b - a for a, b in pairwise(ends[1:])]
    tokens = cell.global_batch * SEQ_LEN
    return Measured(tokens / median(gaps), peak, ends[0] - started, planned)


def command(system: System, cell: Cell, steps: int, out: Path) -> list[str]:
    if system.name == "colotrain":
        return colotrain(system.variant, cell, steps)
    settings = ["--variant", system.variant, "--out", str(out), "--steps", str(steps)]
    settings += ["--micro-batch", str(cell.micro_batch), "--accumulation", str(cell.accumulation)]
    script = str(PEERS / system.script)
    bin_ = Path(sys.executable).parent
    port = str(free_port())
    match system.name:
        case "torch" | "accelerate":  # `accelerate launch` starts one process on CPU
            launch = [f"{bin_}/torchrun", f"--nproc-per-node={cell.ranks}", "--master-port", port]
        case "deepspeed":
            launch = [f"{bin_}/deepspeed", "--num_gpus", str(cell.ranks), "--master_port", port]
        case _:
            launch = [sys.executable]
    return [*launch, script, *settings]


def colotrain(plugin: str, cell: Cell, steps: int) -> list[str]:
    """The same workload as settings: no evaluation; what else users have by default stays on."""
    model = [f"model.args.{key}={value}" for key, value in MODEL.items()]
    return [
        *(sys.executable, "-m", "colotrain", "run", f"plugin={plugin}", "name=bench"),
        *("model.target=colotrain.models.llm:LLM", *model),
        *("data.target=workload:Tokens", f"data.seq_len={SEQ_LEN}"),
        *(f"train.max_steps={steps}", f"train.global_batch={cell.global_batch}"),
        *(f"train.micro_batch={cell.micro_batch}", "train.eval_steps=0"),
        *(f"optim.lr={LR}", "optim.schedule.name=constant", "checkpoint.every=0"),
        f"cluster.procs_per_node={cell.ranks}",
        "--force",
    ]


def environment_of(cell: Cell) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "PEER_RANKS": str(cell.ranks),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(cell.ranks),
        "CI": "1",
    }


def read_peer(out: Path, cell: Cell) -> tuple[list[float], int]:
    documents = [json.loads((out / f"rank{r}.json").read_text()) for r in range(cell.ranks)]
    return documents[0]["ends"], max(document["peak"] for document in documents)


def read_colotrain(out: Path) -> tuple[list[float], int]:
    rundir = RunDir(out / "runs" / "bench")
    steps = [e for e in EventReader(rundir).drain() if e.kind == "step" and e.rank == 0]
    return [event.t for event in steps], max(follow(rundir).peak_by_rank)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed() -> list[System]:
    return [
        s for s in SYSTEMS if s.name in ("torch", "colotrain") or importlib.util.find_spec(s.name)
    ]


def rounds(systems: list[System], cell: Cell, *, num: int, steps: int) -> dict[str, list[Measured]]:
    """Every system once per round; one that fails once is left out from then on."""
    found: dict[str, list[Measured]] = {system.label: [] for system in systems}
    failed: dict[str, str] = {}
    for number in range(num):
        for system in (s for s in systems if s.label not in failed):
            print(
                f"\r{cell}: round {number + 1}/{num}: {system.label:<30}", end="", file=sys.stderr
            )
            try:
                found[system.label].append(measure(system, cell, steps))
            except (RuntimeError, OSError, ValueError, IndexError) as error:
                failed[system.label] = str(error)
    print(file=sys.stderr)
    for label, why in failed.items():
        print(f"{label}: {why}", file=sys.stderr)
    return {label: runs for label, runs in found.items() if label not in failed}


def table(cell: Cell, systems: list[System], found: dict[str, list[Measured]]) -> list[str]:
    """Markdown: medians over the rounds of the ratios to DDP and to the best peer of the stage."""
    ddp = found["torch ddp"]
    lines = [
        f"### {cell}",
        "",
        "| | tokens/s ÷ DDP | ÷ best peer of the stage | peak per rank | ÷ plan | first step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for system in (s for s in systems if s.label in found):
        runs = found[system.label]
        speed = [run.tokens_per_s for run in runs]
        peers = [
            found[s.label]
            for s in systems
            if s.label in found
            and s.stage == system.stage
            and s.name != "colotrain"
            and s.label != system.label
        ]
        of_ddp = median(a / b.tokens_per_s for a, b in zip(speed, ddp, strict=True))
        of_best = "-"
        if peers:
            best = [max(p[i].tokens_per_s for p in peers) for i in range(len(runs))]
            of_best = f"{median(a / b for a, b in zip(speed, best, strict=True)):.2f}"
        peak = median(run.peak_bytes for run in runs) / 2**20
        first = median(run.first_step_s for run in runs)
        name = f"**{system.label}**" if system.name == "colotrain" else system.label
        ratios = [run.peak_bytes / run.planned_bytes for run in runs if run.planned_bytes]
        of_plan = f"{median(ratios):.2f}" if ratios else ""
        row = (name, f"{of_ddp:.2f}", of_best, f"{peak:.0f} MiB", of_plan, f"{first:.1f} s")
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def machine() -> list[str]:
    names = ("torch", "accelerate", "lightning", "deepspeed", "colotrain")
    known = [f"{n} {importlib.metadata.version(n)}" for n in names if importlib.util.find_spec(n)]
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return [
        f"{os.cpu_count()} × {cpu}; Python {platform.python_version()}; {', '.join(known)}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CELLS))))
    parser.add_argument("--only", default="", help="systems whose label contains this, and DDP")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="OUT.json and OUT.md")
    asked = parser.parse_args()
    systems = [s for s in installed() if asked.only in s.label or s.label == "torch ddp"]
    text, document = machine(), {}
    for cell in (CELLS[i] for i in asked.cells):
        found = rounds(systems, cell, num=asked.rounds, steps=asked.steps)
        document[str(cell)] = {k: [vars(run) for run in runs] for k, runs in found.items()}
        part = table(cell, systems, found)
        print("\n".join(part), flush=True)
        text += part
        asked.out.with_suffix(".md").write_text("\n".join(text))
        asked.out.with_suffix(".json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
