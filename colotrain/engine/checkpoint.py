"""Checkpoints: sharded, complete or absent, resumable under any plugin and world size.

A checkpoint is written to a temporary folder, every file synced and its checksum listed in
`manifest.json`, which is written last; then the folder is renamed. Tensors are addressed by
parameter name, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from colotrain.engine.dcp_json import JsonIndexReader, JsonIndexWriter, read_index
from colotrain.errors import ColotrainError
from colotrain.rundir import write_atomically

if TYPE_CHECKING:
    from colotrain.engine.loop import Run

MANIFEST = "manifest.json"


def save(run: Run) -> Path:
    """Write the state after `run.step` steps. All ranks must call; returns the folder."""
    final = run.rundir.checkpoint(run.step)
    temporary = final.with_name(f".{final.name}.tmp")
    if run.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
    dist.barrier()
    _dcp(dcp.save, _tensors(run), storage_writer=JsonIndexWriter(temporary))
    listed: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(listed, _describe_files(temporary, run.rank))
    if run.rank == 0:
        files = {name: entry for part in listed for name, entry in part.items()}
        manifest = {"schema": 1, "files": files, **_progress(run)}
        write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
        _replace_folder(temporary, final)
        prune(run.rundir.checkpoints, keep=run.plan.checkpoint.keep)
    dist.barrier()
    return final


def step_of(path: Path | None) -> int:
    """Steps done in a checkpoint; 0 without one."""
    return _read_manifest(path)["step"] if path else 0


def _read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text("utf-8"))


def restore(run: Run, path: Path) -> None:
    """Read a checkpoint into `run`. All ranks must call.

    Optimizer state of parameters that did not train before starts at zero; a model parameter that
    is missing is an error.
    """
    manifest = _read_manifest(path)
    run.optimizer.prepare_state_()
    wanted, stored = _tensors(run), read_index(path).state_dict_metadata
    missing = [name for name in wanted if name.startswith("model.") and name not in stored]
    if missing:
        raise ColotrainError(
            f"{path}: holds no {missing[0].removeprefix('model.')} ({len(missing)} missing)",
            "resume with the model that the checkpoint was made from",
        )
    wanted = {name: tensor for name, tensor in wanted.items() if name in stored}
    _dcp(dcp.load, wanted, storage_reader=JsonIndexReader(path))
    rng = wanted.get(_rng_key(run.rank))
    if rng is not None and manifest["world_size"] == dist.get_world_size():
        torch.set_rng_state(rng)
    _take_progress(run, manifest)
    if run.rank == 0:
        run.events.write("resumed", step=run.step, path=str(path))


def _dcp(call: Any, state: dict[str, Tensor], **storage: Any) -> None:
    try:
        call(state, **storage)
    except dcp.api.CheckpointException as error:  # a BaseException, which would pass for a kill
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ColotrainError(f"checkpoint: rank {rank}: {cause}", "see the run's logs") from error


def _tensors(run: Run) -> dict[str, Tensor]:
    """Flat name → tensor: parameters, persistent buffers, optimizer state, generator states."""
    model = run.sharded.module
    aliases = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {n for n, _ in model.named_parameters()}
    state = {f"model.{n}": t for n, t in model.state_dict().items() if n not in aliases}
    for name, values in run.optimizer.state().items():
        state |= {f"optim.{name}.{key}": value for key, value in values.items()}
    state[_rng_key(run.rank)] = torch.get_rng_state()
    return state


def _rng_key(rank: int) -> str:
    return f"rng.{rank}"


def _progress(run: Run) -> dict[str, Any]:
    return {
        "step": run.step,
        "optimizer_steps": run.optimizer.steps,
        "micro_batches": run.micro_batches,
        "loss_scale": run.loss_scale.scale,
        "clean_steps": run.loss_scale.clean_steps,
        "world_size": dist.get_world_size(),
        "plugin": run.plan.plugin.name,
        "global_batch": run.plan.batch.global_batch,
        "torch": torch.__version__,
    }


def _take_progress(run: Run, manifest: dict[str, Any]) -> None:
    run.step = run.saved_step = manifest["step"]
    run.optimizer.steps = manifest["optimizer_steps"]
    run.micro_batches = manifest["micro_batches"]
    if run.loss_scale.dynamic:
        run.loss_scale.scale = manifest["loss_scale"]
        run.loss_scale.clean_steps = manifest["clean_steps"]


def _describe_files(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Size and checksum of the files that `rank` wrote; rank 0 describes the index as well."""
    prefix = f"__{rank}_"
    own = [f for f in folder.iterdir() if f.name.startswith(prefix)]
    if rank == 0:
        own += [f for f in folder.iterdir() if not f.name.startswith("__")]
    return {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in own}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_folder(temporary: Path, final: Path) -> None:
    """Make `temporary` the folder `final`, durably."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> list[Path]:
    """Checkpoints under `folder` that were written to the end, newest first."""
    found = [path.parent for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(found, reverse=True)


def prune(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what unfinished writes left."""
    for path in complete(folder)[max(keep, 1) :]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def damage(folder: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint's files (every `parts`-th from `part` on), or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        for name, entry in sorted(files.items())[part::parts]:
            path = folder / Path(name).name
            if not path.is_file():
                return f"{path}: missing"
            if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
                return f"{path}: not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST}: {error}"
    return None


def choose(folder: Path) -> Path | None:
    """The newest intact checkpoint in `folder` (which may be one itself), or None.

    All ranks must call and get the same; each checks a part of the files.
    """
    for path in _candidates(folder):
        found = damage(path, part=dist.get_rank(), parts=dist.get_world_size())
        bad = torch.tensor(float(found is not None))
        dist.all_reduce(bad)
        if bad.item() == 0:
            return path
        if found is not None:
            print(f"checkpoint passed over: {found}", flush=True)
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """The same list on every rank: rank 0 looks, the others are told."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        is_one = (folder / MANIFEST).is_file()
        names = [[str(folder)] if is_one else [str(path) for path in complete(folder)]]
    dist.broadcast_object_list(names)
    yield from (Path(name) for name in names[0])


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Name → whole tensor of every parameter (collective: all ranks must call)."""
    from torch.distributed.tensor import DTensor

    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
