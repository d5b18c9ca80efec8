"""Small runs of the engine whose losses and gradients must be those of the CPU.

    python cases.py FOLDER NAME…     # carries out cases of FOLDER/cases.json, one after the other

All in one process, without a launcher and without forks: about a second each instead of ten, and
the only way to run torch's sanitizer of streams, which starts CUDA with the first operation.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TINY = (
    *("recipe=llm-tiny", "model.args.d_model=256", "model.args.d_hidden=768", "data.seq_len=128"),
    *("train.global_batch=8", "train.micro_batch=2", "train.max_steps=4", "train.eval_every=0"),
    *("train.eval_steps=0", "checkpoint.every=0", "cluster.procs_per_node=1", "optim.lr=0.001"),
    *("optim.schedule.name=constant", "optim.schedule.warmup_steps=0"),
)
WIDE = (*TINY, "model.args.d_model=1024", "model.args.d_hidden=2816", "train.max_steps=6")
"""States of 0.8 GB: a third of them is far above the workspaces of cuBLAS (32 MiB each)."""
LORA = ("adapter.name=lora", "adapter.targets=[blocks.*]")
BF16 = "train.precision=bf16"
THREADS = 2
"""Of each process: with a dozen at the same time more of them wait for one another."""
PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")
OPTIMIZERS = ("adafactor", "muon", "lion")


@dataclass(frozen=True)
class Case:
    """One run, and how far it may be from the CPU's."""

    name: str
    words: tuple[str, ...]
    on: str
    group: str
    """Cases of one group run in one process."""
    like: str = ""
    """Case with the same losses and gradients; empty: it only has to end well."""
    loss: float = 1e-4
    """Largest difference of a loss."""
    gradient: float = 1e-3
    """Largest relative difference of a parameter's first gradient."""
    run: str = ""
    """Folder of the run, where two cases share one."""
    resumes: bool = False
    looks: bool = True
    """Gradients are read."""


def references() -> list[Case]:
    """On the CPU, in four processes."""
    wanted = {
        "cpu": TINY,
        "cpu bf16": (*TINY, BF16),
        "cpu lora": (*TINY, *LORA),
        "cpu frozen": (*TINY, "freeze.patterns=[embed*,blocks.0.*]"),
        "cpu documents": (*TINY, "model.args.num_kv_heads=2", "data.isolate=true"),
        "cpu wide": WIDE,
        "cpu wide bf16": (*WIDE, BF16),
        **{f"cpu {name}": (*TINY, f"optim.name={name}") for name in OPTIMIZERS},
    }
    return [
        Case(name=name, words=(*words, "plugin=zero1"), on="cpu", group=f"cpu {number % 4}")
        for number, (name, words) in enumerate(wanted.items())
    ]


def small_cases(device: str) -> list[Case]:
    """Every case; those with budgets of device memory, and the sanitizer's, on CUDA alone."""
    cases = references()
    rough = {"loss": 2e-2, "gradient": 0.1}

    def add(name: str, *words: str, group: str, like: str = "cpu", **more: Any) -> None:
        cases.append(Case(name=name, words=words, on=device, group=group, like=like, **more))

    for plugin in PLUGINS:
        add(plugin, *TINY, f"plugin={plugin}", group="plugins")
        bf16 = (*TINY, f"plugin={plugin}", BF16)
        add(f"{plugin} bf16", *bf16, group="plugins", like="cpu bf16", **rough)
    for recompute in ("selective", "full"):
        key = f"train.activation_checkpointing={recompute}"
        add(recompute, *TINY, "plugin=zero1", key, group="more")
        words = (*TINY, "plugin=zero3", BF16, key)
        add(f"{recompute} bf16", *words, group="more", like="cpu bf16", **rough)
    words = (*TINY, "plugin=zero3", "train.precision=fp16")
    add("fp16", *words, group="more", loss=1e-2, gradient=0.1)
    add("lora", *TINY, "plugin=zero3", *LORA, group="more", like="cpu lora")
    words = (*TINY, "plugin=zero2", "freeze.patterns=[embed*,blocks.0.*]")
    add("frozen", *words, group="more", like="cpu frozen")
    words = (*TINY, "model.args.num_kv_heads=2", "data.isolate=true", "plugin=zero1")
    add("documents", *words, group="more", like="cpu documents")
    add("documents bf16", *words, BF16, group="more", like="cpu documents", **rough)
    for name in OPTIMIZERS:
        words = (*TINY, "plugin=zero2", f"optim.name={name}")
        add(name, *words, group="more", like=f"cpu {name}", loss=2e-3, gradient=0.1)
    add("memory copy", *TINY, "plugin=zero2", "elastic.memory_copy=1GiB", group="more")
    for recompute in ("none", "selective", "full"):
        key = f"train.activation_checkpointing={recompute}"
        words = (*TINY, "plugin=zero3", BF16, "train.compile=true", key)
        add(f"compiled {recompute}", *words, group="compiled", like="cpu bf16", **rough)
    if device == "cuda":
        add_budgets(add)
        add_sanitized(add)
    return cases


def add_budgets(add: Any) -> None:
    """gemini with less on the device than its states, a resume with another budget among them."""
    gemini = (*WIDE, "plugin=gemini")
    wide = {"like": "cpu wide", "group": "budgets", "loss": 1e-3, "gradient": 1e-2}
    add("gemini 60 %", *gemini, "plugin.budget.device=480MiB", **wide)
    add("gemini 35 %", *gemini, "plugin.budget.device=280MiB", **wide)
    rough = wide | {"like": "cpu wide bf16", "loss": 0.1, "gradient": 0.1}
    add("gemini 35 % bf16", *gemini, "plugin.budget.device=280MiB", BF16, **rough)
    begun = (*gemini, "checkpoint.every=3")
    words = (*begun, "plugin.budget.device=280MiB", "train.max_steps=3")
    add("begun", *words, run="resumed run", **wide)
    words = (*begun, "plugin.budget.device=480MiB")
    add("resumed", *words, run="resumed run", resumes=True, **wide)


def add_sanitized(add: Any) -> None:
    """Two steps each under torch's sanitizer, which names accesses of two streams to one tensor."""
    short = ("train.max_steps=2", "train.global_batch=4")
    how = {"group": "sanitizer", "like": "", "looks": False}
    full = "train.activation_checkpointing=full"
    add("sanitized zero3", *TINY, *short, "plugin=zero3", BF16, full, **how)
    words = (*WIDE, *short, "plugin=gemini", "plugin.budget.device=280MiB")
    add("sanitized gemini", *words, **how)
    words = (*TINY, *short, "plugin=zero2", "elastic.memory_copy=1GiB")
    add("sanitized memory copy", *words, **how)


GRADIENTS: dict[str, torch.Tensor] = {}
"""Parameter → whole gradient of the first step, which `train.on_gradients` reads."""


def keep_gradients(model: torch.nn.Module, step: int) -> None:
    import colotrain

    for view in colotrain.gradients(model):
        GRADIENTS.setdefault(view.name, view.full().detach().float().cpu().clone())


MEMORY: dict[str, list[int]] = {}
"""Run → files in this process's memory, which stands for its launcher, for copies of the state."""


def offer_memory(run: str) -> None:
    from colotrain.records import to_plain
    from colotrain.spec.elastic import COPIES, COPY_PLACES, CopyPlaces

    handles = MEMORY.setdefault(run, [os.memfd_create("copy") for _ in range(COPIES)])
    places = CopyPlaces(launcher=os.getpid(), files=tuple(handles))
    os.environ[COPY_PLACES] = json.dumps(to_plain(places))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def carry_out(case: Case, folder: Path) -> dict[str, Any]:
    """Train as a worker does; what was seen, as JSON."""
    from colotrain.engine import worker
    from colotrain.engine.step.train import train
    from colotrain.events.log import EventReader, EventWriter
    from colotrain.rundir import RunDir
    from colotrain.runs.resolving import plan_from

    name = case.run or case.name
    rundir, attempt = RunDir(folder / name), int(case.resumes)
    kept = ["train.on_gradients=cases:keep_gradients"] if case.looks else []
    plan = plan_from([*case.words, f"cluster.device={case.on}", *kept], here=False)
    plan = replace(plan, cluster=replace(plan.cluster, threads_per_rank=THREADS))
    GRADIENTS.clear()
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    offer_memory(name)
    on_gpu, left = case.on == "cuda", 0
    if on_gpu:
        gc.collect()  # what the case before left in cycles
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
    here = worker.connect(plan)
    if not case.resumes:
        rundir.create()
    events = EventWriter(rundir.event_file(rank=0, attempt=attempt))
    try:
        run = worker.prepare(plan, rundir, device=here, events=events, stop=lambda: None)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        outcome = train(run)
    finally:
        dist.destroy_process_group()
    seen = EventReader(rundir).drain()
    steps = [e.fields for e in seen if e.kind == "step" and e.rank == 0]
    found: dict[str, Any] = {
        "outcome": outcome,
        "losses": [fields["loss"] for fields in steps if "loss" in fields],
        "tiers": [e.fields["bytes"] for e in seen if e.kind == "tiers"][-1:],
        "notes": [e.fields["text"] for e in seen if e.kind == "note"][:4],
    }
    if on_gpu:
        found["peak"] = torch.cuda.max_memory_allocated() - left
        found["reserved"] = torch.cuda.max_memory_reserved()
        found["planned"] = plan.memory.total - plan.memory.baseline
    if GRADIENTS:
        torch.save(dict(GRADIENTS), folder / f"{case.name}.gradients.pt")
    return found


def write_cases(cases: list[Case], folder: Path) -> None:
    document = {case.name: asdict(case) for case in cases}
    (folder / "cases.json").write_text(json.dumps(document))


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """What became of a case, with `failed` where it is not like the CPU's."""
    found = read(case.name, folder)
    row: dict[str, Any] = {"seconds": found.get("seconds", 0.0)}
    if "error" in found:
        return row | {"failed": found["error"]}
    if case.on == "cuda":
        row |= {f"{k}_MiB": found[k] >> 20 for k in ("peak", "planned", "reserved")}
    if not case.like:
        return row
    losses, wanted = found["losses"], read(case.like, folder).get("losses", [])
    if not 0 < len(losses) <= len(wanted):  # a run that is resumed later makes fewer
        return row | {"failed": f"{len(losses)} losses, {len(wanted)} of {case.like}"}
    row["losses"] = losses
    row["loss_off"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=False))
    if not case.resumes:  # its first gradients are those of a later step
        row["gradient_off"], worst = gradients_apart(case, folder)
        if not row["gradient_off"] <= case.gradient:
            row["failed"] = f"the gradient of {worst} is more than {case.gradient:g} off"
    if not row["loss_off"] <= case.loss:
        row["failed"] = f"a loss is more than {case.loss:g} off"
    return row


def gradients_apart(case: Case, folder: Path) -> tuple[float, str]:
    """Largest relative difference of a first gradient, and its parameter."""
    ours, theirs = (torch.load(folder / f"{n}.gradients.pt") for n in (case.name, case.like))
    if ours.keys() != theirs.keys():
        return float("inf"), f"{sorted(ours.keys() ^ theirs.keys())[:2]}"
    apart = {
        name: ((ours[name] - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()
        for name, wanted in theirs.items()
    }
    worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]))
    return apart[worst], worst


def read(name: str, folder: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {"error": "did not run"}
    return document


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    documents = json.loads((folder / "cases.json").read_text())
    faulthandler.dump_traceback_later(90)  # to stderr, where a case hangs
    for name in names:
        began = time.monotonic()
        case = Case(**documents[name] | {"words": tuple(documents[name]["words"])})
        try:
            found = carry_out(case, folder)
        except (Exception, SystemExit) as error:
            found = {"error": f"{type(error).__name__}: {error}"[:400]}
            (folder / f"{name}.trace").write_text(traceback.format_exc())
            if dist.is_initialized():
                dist.destroy_process_group()
        found["seconds"] = time.monotonic() - began
        (folder / f"{name}.json").write_text(json.dumps(found, default=str))
        print(f"{name}: {found.get('error', 'done')} {found['seconds']:.1f} s", flush=True)
        if "CUDA error" in found.get("error", ""):
            break  # nothing works in this process any more
    os._exit(0)


if __name__ == "__main__":
    import cases as itself  # `train.on_gradients` imports it by name

    itself.main()
