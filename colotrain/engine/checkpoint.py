"""Checkpoints: sharded, complete or absent, resumable under any plugin and world size.

A checkpoint is written to a temporary folder, every file synced and its checksum listed in
`manifest.json`, which is written last; then the folder is renamed. Tensors are addressed by
parameter name, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from colotrain.engine.dcp_json import JsonIndexReader, JsonIndexWriter, read_index
from colotrain.errors import ColotrainError
from colotrain.models import huggingface
from colotrain.records import to_plain
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
    _dcp(dcp.save, _tensors(run, unchanged(run)), storage_writer=JsonIndexWriter(temporary))
    mine = (_describe_files(temporary, run.rank), random.getstate())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if run.rank == 0:
        files = {name: entry for part, _ in everyone for name, entry in part.items()}
        states = [state for _, state in everyone]
        manifest = {"schema": 1, "files": files, **_progress(run), "python_random": states}
        manifest |= {"left_out": sorted(unchanged(run)), "began_with": _began_with(run)}
        write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
        _replace_folder(temporary, final)
        prune(run.rundir.checkpoints, keep=run.plan.checkpoint.keep, newest=final)
    dist.barrier()
    return final


def step_of(path: Path | None) -> int:
    """Steps done in a checkpoint; 0 without one."""
    return _read_manifest(path)["step"] if path else 0


def left_out(path: Path) -> list[str]:
    """Parameters that a checkpoint does not hold: they are what the run began with."""
    names: list[str] = _read_manifest(path).get("left_out", [])
    return names


def _read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text("utf-8"))


def restore(run: Run, path: Path) -> None:
    """Read a checkpoint into `run`. All ranks must call.

    Optimizer state of parameters that did not train before starts at zero; a model parameter that
    is missing is an error.
    """
    manifest = _read_manifest(path)
    if manifest["global_batch"] != run.plan.batch.global_batch:
        raise ColotrainError(
            f"train.global_batch={run.plan.batch.global_batch}: {path} was made with "
            f"{manifest['global_batch']}, so samples would be skipped or repeated",
            f"set train.global_batch={manifest['global_batch']}",
        )
    run.optimizer.prepare_state_()
    wanted, stored = _tensors(run), read_index(path).state_dict_metadata
    wanted = _less_what_is_left_out(run, path, wanted)
    missing = [name for name in wanted if name.startswith("model.") and name not in stored]
    if missing:
        raise ColotrainError(
            f"{path}: holds no {missing[0].removeprefix('model.')} ({len(missing)} missing)",
            "resume with the model that the checkpoint was made from",
        )
    run.restored |= {name.removeprefix("model.") for name in wanted if name.startswith("model.")}
    wanted = {name: tensor for name, tensor in wanted.items() if name in stored}
    _dcp(dcp.load, wanted, storage_reader=JsonIndexReader(path))
    if manifest["world_size"] == dist.get_world_size():
        _set_generators(run, wanted, manifest["python_random"][run.rank])
    _take_progress(run, manifest)
    if run.rank == 0:
        run.events.write("resumed", step=run.step, path=str(path))


def unchanged(run: Run) -> set[str]:
    """Parameters that the plan leaves out of checkpoints: those that never trained.

    What an earlier checkpoint held is kept, for it may have trained before it was frozen.
    """
    if run.plan.checkpoint.content == "all":
        return set()
    return set(run.gradients.frozen) - set(run.optimizer.parameters) - run.restored


def _began_with(run: Run) -> dict[str, Any]:
    """What decides the values of parameters that never trained."""
    model = run.plan.model
    files = huggingface.fingerprint(Path(model.hf)) if model.hf else None
    seed = None if model.hf else run.plan.train.seed
    return to_plain({"target": model.target, "args": model.args, "files": files, "seed": seed})


def _less_what_is_left_out(run: Run, path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """`wanted` without the parameters that are what this run began with, as the saved one did."""
    spared = {f"model.{name}" for name in left_out(path)}
    if spared and _read_manifest(path)["began_with"] != _began_with(run):
        raise ColotrainError(
            f"{path}: holds only what trained, of a run that began with another model",
            "resume with the model, its arguments and the seed that it was made from",
        )
    return {name: tensor for name, tensor in wanted.items() if name not in spared}


def _dcp(call: Any, state: dict[str, Tensor], **storage: Any) -> None:
    try:
        call(state, **storage)
    except dcp.api.CheckpointException as error:  # a BaseException, which would pass for a kill
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ColotrainError(f"checkpoint: rank {rank}: {cause}", "see the run's logs") from error


def _tensors(run: Run, skipped: Set[str] = frozenset()) -> dict[str, Tensor]:
    """Flat name → tensor: parameters, persistent buffers, optimizer state, generator states."""
    model = run.sharded.module
    aliases = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {n for n, _ in model.named_parameters()}
    state = {f"model.{n}": t for n, t in model.state_dict().items() if n not in aliases}
    state = {name: t for name, t in state.items() if name.removeprefix("model.") not in skipped}
    for name, values in run.optimizer.state().items():
        state |= {f"optim.{name}.{key}": value for key, value in values.items()}
    state[f"rng.{run.rank}"] = torch.get_rng_state()
    if run.device.type == "cuda":
        state[f"rng.{run.rank}.cuda"] = torch.cuda.get_rng_state(run.device)
    return state


def _set_generators(run: Run, stored: dict[str, Tensor], python: list[Any]) -> None:
    """Set this rank's generators to where they were."""
    version, numbers, gauss = python
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(stored[f"rng.{run.rank}"])
    if run.device.type == "cuda" and f"rng.{run.rank}.cuda" in stored:
        torch.cuda.set_rng_state(stored[f"rng.{run.rank}.cuda"], run.device)


def _progress(run: Run) -> dict[str, Any]:
    return {
        "step": run.step,
        "optimizer_steps": run.optimizer.steps,
        "micro_batches": run.micro_batches,
        "loss_scale": run.loss_scale.scale if run.loss_scale.dynamic else None,
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
    if run.loss_scale.dynamic and manifest["loss_scale"] is not None:
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
    _sync(temporary)
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
    _sync(final.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> list[Path]:
    """Checkpoints under `folder` that were written to the end, newest first."""
    found = [path.parent for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(found, reverse=True)


def prune(folder: Path, *, keep: int, newest: Path) -> None:
    """Keep `newest` and the `keep` - 1 before it; delete the rest, and what unfinished writes left.

    What is of a later step than `newest` was passed over as damaged when the run resumed.
    """
    known = complete(folder)
    kept = known[known.index(newest) :][: max(keep, 1)]
    for path in set(known) - set(kept):
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
    """The newest intact checkpoint in `folder` (which may be one itself), or None without any.

    All ranks must call and get the same; each checks a part of the files. That there are some and
    none is intact is an error.
    """
    candidates = _candidates(folder)
    for path in candidates:
        found = damage(path, part=dist.get_rank(), parts=dist.get_world_size())
        bad = torch.tensor(float(found is not None))
        dist.all_reduce(bad)
        if bad.item() == 0:
            return path
        if found is not None:
            print(f"checkpoint passed over: {found}", flush=True)
    if candidates:
        raise ColotrainError(
            f"{folder}: none of {len(candidates)} checkpoints is intact (see the logs)",
            "start again with another name, or give checkpoint.resume=PATH of an older one",
        )
    return None


def _candidates(folder: Path) -> list[Path]:
    """The same list on every rank: rank 0 looks, the others are told."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        is_one = (folder / MANIFEST).is_file()
        names = [[str(folder)] if is_one else [str(path) for path in complete(folder)]]
    dist.broadcast_object_list(names)
    return [Path(name) for name in names[0]]
