"""Runs cases in this process, one after the other: `python -m tests.simulated.worker FOLDER`.

`FOLDER/cases.json` holds them; each leaves `FOLDER/NAME/found-RANK.json` and its gradients. Several
ranks are several processes, each with RANK and WORLD_SIZE, in one folder.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.simulated import device  # first: it must come before torch

import torch  # isort: skip
import torch._dynamo  # here: later it would take the device's functions for torch's own
import torch.distributed as dist

import colotrain
from colotrain.engine import worker
from colotrain.engine.step import monitor
from colotrain.engine.step.train import train
from colotrain.events.log import EventReader, EventWriter
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.runs.resolving import plan_from
from colotrain.spec.elastic import COPIES, COPY_PLACES, CopyPlaces
from colotrain.torch_internals import timeout_s
from tests.simulated import plants
from tests.simulated.case import Case

monitor.LONG_STEP_S = math.inf
"""Before a long step the host waits, to know what to save. The machine decides what is long."""

GRADIENTS: dict[str, torch.Tensor] = {}
"""Parameter → whole gradient, of the last step."""


MEMORY: dict[str, list[int]] = {}
"""Run → files in this process's memory, which stands for its launcher, for copies of the state."""

TRIAL = re.compile("engine/step/(targets|loss_trial)")
"""Where the host waits once, before the first step: to find what the loss is a mean over."""


def offer_memory(run: str) -> None:
    """Give the next case files for copies in memory, as a launcher does."""
    handles = MEMORY.setdefault(run, [os.memfd_create("copy") for _ in range(COPIES)])
    places = CopyPlaces(launcher=os.getpid(), files=tuple(handles))
    os.environ[COPY_PLACES] = json.dumps(to_plain(places))


def keep_gradients(model: torch.nn.Module, step: int) -> None:
    """`train.on_gradients` of every case."""
    for view in colotrain.gradients(model):
        GRADIENTS[f"{step}:{view.name}"] = view.full().detach().cpu().clone()


def carry_out(case: Case, folder: Path) -> dict[str, Any]:
    """Train as a worker does; what was seen, as JSON."""
    rundir, rank = RunDir(folder / (case.run or case.name)), int(os.environ["RANK"])
    kept = "train.on_gradients=tests.simulated.worker:keep_gradients"
    words = [*case.words, f"cluster.device={case.on}", *([kept] if case.looks else [])]
    plan = plan_from(words, here=False)
    on_device = (
        device.simulated(limit=case.limit) if case.on == "cuda" else contextlib.nullcontext()
    )
    GRADIENTS.clear()
    offer_memory(case.run or case.name)
    with on_device as gpu, getattr(plants, case.plant or "nothing")():
        here = worker.connect(plan)
        if rank == 0 and case.attempt == 0:
            rundir.create()
        dist.barrier()
        events = EventWriter(rundir.event_file(rank=rank, attempt=case.attempt))
        try:
            run = worker.prepare(plan, rundir, device=here, events=events, stop=lambda: None)
            found: dict[str, Any] = {}
            if gpu is not None:
                found = {"built_peak": gpu.peak, "built": gpu.allocated}
                gpu.forget()
            groups = run.sharded.comms.mesh.get_all_groups()
            found |= {"timeout_s": timeout_s(), "shortest_timeout_s": timeout_s(*groups)}
            found["outcome"] = train(run)
            found["restored"] = run.step
        finally:
            dist.destroy_process_group()
        if gpu is not None:
            model = plan.memory
            found |= {
                "races": dict(gpu.races),
                "waits": {line: n for line, n in gpu.waits.items() if not TRIAL.search(line)},
                "launches": dict(gpu.launches),
                "kinds": dict(gpu.kinds),
                "num_launches": sum(gpu.launches.values()),
                "peak": gpu.peak,
                "pinned": gpu.pinned_bytes,
                "planned": model.total - model.baseline,
            }
        seen = EventReader(rundir).drain()
        steps = [e.fields for e in seen if e.kind == "step" and e.rank == 0]
        found["losses"] = [fields["loss"] for fields in steps if "loss" in fields]
        found["laps"] = [{k: fields[k] for k in fields if k.endswith("_s")} for fields in steps]
        found["events"] = [[e.kind, e.rank, e.fields] for e in seen if e.kind != "step"]
        if rank == 0:
            torch.save(dict(GRADIENTS), folder / case.name / "gradients.pt")
    return found


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    for port, fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        os.environ |= {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_PORT": str(port)}
        (folder / case.name).mkdir(exist_ok=True, parents=True)
        try:
            found = carry_out(case, folder)
        except Exception as error:
            text = traceback.format_exc()
            found = {"error": f"{type(error).__name__}: {error}", "traceback": text}
        (folder / case.name / f"found-{rank}.json").write_text(json.dumps(found, default=str))
        gc.collect()  # what a case left would be freed, and counted as a wait, in the next one
        print(f"{case.name}: {found.get('error', 'done')} [{rank}/{world}]", flush=True)


if __name__ == "__main__":
    from tests.simulated import worker as itself  # on_gradients imports it by name

    itself.main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
