"""colotrain's plugins beside the systems that people use, on one workload. `make bench`

Every system is a process tree of its own, started as its users start it. As many as memory holds
are alive at once, plain DDP always among them, and take turns: one trains for some steps while the
others are halted. What is compared are ratios to DDP within a turn, so that the speed of a shared
machine, which drifts, is the same for all. Where ranks divide matrices, or the model into stages,
torch's own way to do so is in DDP's place. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from processes import Running
from workload import LR, MODEL, SEQ_LEN, Cell

from colotrain.events.fold import follow
from colotrain.events.log import EventReader
from colotrain.events.view import StageView, stages
from colotrain.rundir import RunDir

PEERS = Path(__file__).parent / "peers"
TURN_TIMEOUT_S = 600
POLL_S = 0.02
WARM_STEPS = 2
RANK_BYTES = 1400 << 20
"""What a rank of the largest peer needs, about."""
CELLS = (
    Cell(ranks=2, micro_batch=1, accumulation=1),
    Cell(ranks=2, micro_batch=4, accumulation=1),
    Cell(ranks=2, micro_batch=1, accumulation=4),
    Cell(ranks=2, micro_batch=4, accumulation=4),
    Cell(ranks=4, micro_batch=1, accumulation=1),
    Cell(ranks=2, micro_batch=4, accumulation=1, tp=2),
    Cell(ranks=4, micro_batch=4, accumulation=1, tp=2),
    Cell(ranks=2, micro_batch=1, accumulation=1, tp=2),
    Cell(ranks=4, micro_batch=1, accumulation=1, tp=2),
    Cell(ranks=2, micro_batch=1, accumulation=8, pp=2),
    Cell(ranks=4, micro_batch=1, accumulation=8, pp=2),
)


@dataclass(frozen=True)
class System:
    """Something that trains. `stage` says whom it is compared with: 0 is replicas."""

    name: str
    variant: str
    stage: int
    script: str = ""
    settings: tuple[str, ...] = ()
    """colotrain: further settings."""

    @property
    def label(self) -> str:
        return " ".join((self.name, self.variant, *self.settings))


DDP = System("torch", "ddp", 0, "plain.py")
DTENSOR = System("torch", "tp", 3, "with_dtensor.py")
PIPELINE = System("torch", "1f1b+fully_shard", 2, "with_pipeline.py")
OWN_WAYS = (DTENSOR.script, PIPELINE.script)
"""Scripts for cells with axes beside data parallelism."""
SYSTEMS = [
    DDP,
    DTENSOR,
    PIPELINE,
    System("torch", "tp+sp", 3, "with_dtensor.py"),
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


@dataclass
class Contestant:
    """One run of one system, which goes on only in its turns."""

    system: System
    cell: Cell
    running: Running
    out: Path
    first_step_s: float = 0.0
    """From the start of the command to the end of the first step."""
    turns_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Resident, of the rank that has the most."""
    of_plan: float | None = None
    """What colotrain counts as its peak, by what its plan predicts."""
    stages: tuple[StageView, ...] = ()
    """colotrain's pipeline stages."""

    def __post_init__(self) -> None:
        self.events, self.seen = EventReader(RunDir(self.out / "runs" / "bench")), 0

    def num_steps(self) -> int:
        """Optimizer steps so far."""
        if self.system.name != "colotrain":
            return max((f.stat().st_size for f in self.out.glob("steps-*")), default=0)
        self.seen += sum(e.kind == "step" and e.rank == 0 for e in self.events.drain())
        return self.seen

    def go_on(self, num_steps: int) -> float:
        """Seconds until so many steps more have ended."""
        until, started = self.num_steps() + num_steps, time.monotonic()
        self.running.go_on()
        while self.num_steps() < until:
            time.sleep(POLL_S)
            self.running.check()
            if time.monotonic() - started > TURN_TIMEOUT_S:
                raise RuntimeError(f"no {num_steps} steps within {TURN_TIMEOUT_S} s")
        seconds = time.monotonic() - started
        self.running.halt()
        return seconds

    def weigh(self) -> None:
        self.peak_bytes = self.running.peak_bytes()
        if self.system.name == "colotrain":
            rundir = RunDir(self.out / "runs" / "bench")
            view, plan = follow(rundir), rundir.plan()
            self.of_plan = max(view.peak_by_rank) / plan.memory.total
            self.stages = stages(view, plan)


def command(system: System, cell: Cell, steps: int, out: Path) -> list[str]:
    if system.name == "colotrain":
        return [*colotrain(system.variant, cell, steps), *system.settings]
    settings = ["--variant", system.variant, "--out", str(out), "--steps", str(steps)]
    settings += ["--micro-batch", str(cell.micro_batch), "--accumulation", str(cell.accumulation)]
    settings += ["--tp", str(cell.tp), "--pp", str(cell.pp)]
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
        *(f"cluster.procs_per_node={cell.ranks}", f"mesh.tp={cell.tp}"),
        *(f"mesh.pp={cell.pp}", "--force"),
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed() -> list[System]:
    return [
        s for s in SYSTEMS if s.name in ("torch", "colotrain") or importlib.util.find_spec(s.name)
    ]


def base_of(cell: Cell) -> System:
    """What the others are compared with."""
    return PIPELINE if cell.pp > 1 else DTENSOR if cell.tp > 1 else DDP


def can_train(system: System, cell: Cell) -> bool:
    own = base_of(cell).script
    alike = system.script == own if own in OWN_WAYS else system.script not in OWN_WAYS
    return system.name == "colotrain" or alike


def heats(systems: list[System], cell: Cell) -> list[list[System]]:
    """Who takes turns with whom: the base and as many others as memory holds, stage by stage."""
    most, base = psutil.virtual_memory().available // (cell.ranks * RANK_BYTES) - 1, base_of(cell)
    able = [s for s in systems if can_train(s, cell) and s != base]
    others = sorted(able, key=lambda s: s.stage)
    num_heats = max(1, math.ceil(len(others) / max(1, most)))
    size = math.ceil(len(others) / num_heats)
    return [[base, *others[i * size : (i + 1) * size]] for i in range(num_heats)]


def compete(systems: list[System], cell: Cell, *, turns: int, steps: int) -> list[Contestant]:
    """One heat; a system that fails is announced and left out."""
    with ExitStack() as stack:
        found: list[Contestant] = []
        for system in systems:
            out = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
            words = command(system, cell, WARM_STEPS + turns * steps + 1, out)
            running = Running(words, out, environment=environment_of(cell))
            contestant = Contestant(system, cell, stack.enter_context(running), out)
            with left_out_if_it_fails(contestant, found):
                contestant.first_step_s = contestant.go_on(1)
                contestant.go_on(WARM_STEPS - 1)
                found.append(contestant)
        for turn in range(turns):
            for contestant in found[:: 1 if turn % 2 == 0 else -1]:
                progress(f"{cell}: turn {turn + 1}/{turns}: {contestant.system.label}")
                with left_out_if_it_fails(contestant, found):
                    contestant.turns_s.append(contestant.go_on(steps))
        for contestant in found[:]:
            with left_out_if_it_fails(contestant, found):
                contestant.weigh()
        progress("")
    return found


@contextmanager
def left_out_if_it_fails(contestant: Contestant, found: list[Contestant]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        print(f"\r{contestant.system.label}: {error}", file=sys.stderr)
        contestant.running.signal(signal.SIGKILL)
        if contestant in found:
            found.remove(contestant)


def progress(words: str) -> None:
    print(f"\r{words:<79}", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Measured:
    """What a system came to in a cell; ratios are medians over turns."""

    stage: int
    ours: bool
    of_base: float
    """Its tokens/s by those of DDP, or torch's tensor parallelism, in the same turn."""
    tokens_per_s: float
    peak_bytes: int
    of_plan: float | None
    first_step_s: float
    first_step_of_base: float
    turns_s: list[float]


def judge(heat: list[Contestant], steps: int) -> dict[str, Measured]:
    """Label -> figures. Raises `RuntimeError` where the base itself failed."""
    base = next((c for c in heat if c.system == base_of(c.cell)), None)
    if base is None:
        raise RuntimeError("plain torch failed: there is nothing to compare with")
    return {
        c.system.label: Measured(
            stage=c.system.stage,
            ours=c.system.name == "colotrain",
            of_base=median(b / a for a, b in zip(c.turns_s, base.turns_s, strict=True)),
            tokens_per_s=c.cell.global_batch * SEQ_LEN * steps / median(c.turns_s),
            peak_bytes=c.peak_bytes,
            of_plan=c.of_plan,
            first_step_s=c.first_step_s,
            first_step_of_base=c.first_step_s / base.first_step_s,
            turns_s=c.turns_s,
        )
        for c in heat
    }


def table(cell: Cell, found: dict[str, Measured]) -> list[str]:
    """Markdown; the best peer of a stage is the one that is fastest beside DDP."""
    lines = [
        f"### {cell}",
        "",
        f"| | tokens/s ÷ {base_of(cell).label} "
        "| ÷ best peer of the stage | peak per rank | ÷ plan | first step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, mine in found.items():
        peers = [
            other.of_base
            for name, other in found.items()
            if other.stage == mine.stage and not other.ours and name != label
        ]
        row = (
            f"**{label}**" if mine.ours else label,
            f"{mine.of_base:.2f}",
            f"{mine.of_base / max(peers):.2f}" if peers else "-",
            f"{mine.peak_bytes / 2**20:.0f} MiB",
            f"{mine.of_plan:.2f}" if mine.of_plan else "",
            f"{mine.first_step_s:.1f} s",
        )
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
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a turn")
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CELLS))))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of systems' labels")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="OUT.json and OUT.md")
    asked = parser.parse_args()
    bases = (DDP, DTENSOR, PIPELINE)
    systems = [s for s in installed() if s in bases or any(part in s.label for part in asked.only)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # halted systems end with this
    text, document = machine(), {}
    for cell in (CELLS[i] for i in asked.cells):
        found: dict[str, Measured] = {}
        for heat in heats(systems, cell):
            done = compete(heat, cell, turns=asked.turns, steps=asked.steps)
            found = judge(done, asked.steps) | found  # the base's figures are the first heat's
        found = {s.label: found[s.label] for s in systems if s.label in found}
        document[str(cell)] = {label: vars(measured) for label, measured in found.items()}
        part = table(cell, found)
        print("\n".join(part), flush=True)
        text += part
        asked.out.with_suffix(".md").write_text("\n".join(text))
        asked.out.with_suffix(".json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
