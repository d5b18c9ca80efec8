"""Log-probabilities of preference pairs under the model as the run begins, its reference.

They are computed once, by a pass over the pairs that the run reads, before a checkpoint is
restored, and kept in the run directory. So no second model is in memory, and a resumed run reads
the same values.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from colotrain.data.prepare.identity import identities
from colotrain.data.read.ahead import AheadLoader
from colotrain.data.read.loader import BatchLoader, stack
from colotrain.data.read.teacher import WithReferences, wanted
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import to_device
from colotrain.engine.model.unchanged import unchanged
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.events.kinds import Note
from colotrain.models import huggingface
from colotrain.models.loss import by_token
from colotrain.models.preferences import inputs_of, log_probs_of
from colotrain.records import to_plain
from colotrain.spec.phases import Phase

Known = dict[str, Tensor]
"""Split → log-probabilities [samples, 2], NaN where they are not known."""


def add_references_(run: Run) -> None:
    """Give the run's pairs the log-probabilities of its reference. All ranks must call.

    The model must have the weights with which the run begins. A run that is asked to stop keeps
    what it has computed, and has a reason to stop afterwards.
    """
    key = key_of(run) if run.rank == 0 else ""
    known: Known = exchange.broadcast_tensors(load(run, key) if run.rank == 0 else {})
    is_new = False
    for split, loader, positions in (
        ("train", run.train_data, run.plan.train.max_steps * run.plan.batch.global_batch),
        ("validation", run.validation_data, run.validation_data and run.validation_data.end),
    ):
        if loader is None or not positions:
            continue
        samples = loader.samples
        assert isinstance(samples, WithReferences)
        if split in known and len(known[split]) == len(samples):
            samples.values.copy_(known[split])
        ids = wanted(loader.order, len(samples), positions)
        ids = ids[samples.values[ids, 0].isnan().numpy()]
        if len(ids):
            is_new = True
            if run.rank == 0:
                what = f"log-probabilities of {len(ids)} {split} pairs under the reference"
                text = f"{what}, the model as the run begins, are computed once"
                run.events.write(Note(text=text))
            samples.values[ids] = compute(run, loader, ids)
        known[split] = samples.values
        if run.stop.reason is not None:
            break
    if is_new and run.rank == 0:
        save(run, known, key)
    for loader in (run.train_data, run.validation_data):
        if isinstance(loader, AheadLoader):
            loader.restart()


def compute(run: Run, loader: BatchLoader, ids: np.ndarray[Any, Any]) -> Tensor:
    """Log-probabilities [ids, 2] on the CPU. All ranks must call; each does as many forwards.

    Where a rank is asked to stop, `run.stop.reason` says so on all, and the rest are NaN.
    """
    size, world, model = run.plan.batch.micro_batch, dist.get_world_size(), run.sharded.module
    found = torch.zeros(len(ids), 2, dtype=torch.float64)
    done = len(ids)
    with torch.no_grad(), unchanged(model, run.device):
        for start in range(0, len(ids), size * world):
            if is_to_stop(run):
                done = start
                break
            run.at(Phase.REFERENCE)
            run.sharded.calls.clear()
            first = start + run.rank * size
            places = [min(i, len(ids) - 1) for i in range(first, first + size)]
            rows = [(int(ids[i]), loader.samples[int(ids[i])]) for i in places]
            batch = to_device(stack(rows), run.device)
            with by_token():
                output = model(**inputs_of(batch))
            stop = min(first + size, len(ids))
            if first < stop:
                found[first:stop] = log_probs_of(batch, output).cpu()[: stop - first]
    reshard(run.sharded)
    shared = found.to(run.device)
    dist.all_reduce(shared)
    shared[done:] = torch.nan
    return shared.cpu()


def is_to_stop(run: Run) -> bool:
    """Whether any rank is asked to stop; `run.stop.reason` is set then. All ranks must call."""
    own = run.stop.wanted()
    asked = torch.tensor(float(own is not None), device=run.device)
    dist.all_reduce(asked)
    if asked.item():
        run.stop.reason = own or "another rank"
    return run.stop.reason is not None


def key_of(run: Run) -> str:
    """Hash of all that the log-probabilities depend on: model, first weights, data, precision."""
    plan = run.plan
    content = {
        "model": {**to_plain(plan.model), "dpo_beta": None},
        "directory": huggingface.fingerprint(Path(plan.model.hf)) if plan.model.hf else None,
        "seed": plan.train.seed,
        "precision": plan.train.precision,
        "data": identities(plan.data),
        "seq_len": plan.data.seq_len,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(run: Run, key: str) -> Known:
    """The values in the run directory; empty where there are none for this key."""
    try:
        with safe_open(run.rundir.references_file, "pt") as file:
            if file.metadata().get("key") != key:
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}


def save(run: Run, known: Known, key: str) -> None:
    content = serialized({name: values.clone() for name, values in known.items()}, {"key": key})
    run.rundir.write(run.rundir.references_file, content)
