"""The state of a run: what is saved or copied to memory, and going on from it under any plugin.

Tensors are addressed by parameter name; everything else is in the manifest, as JSON.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import generators
from colotrain.engine.optim.schedule import rate_warning
from colotrain.engine.optim.schedule_free import averaged
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.state import plain_state, sources
from colotrain.engine.state.index import Index, load, read_index, with_own
from colotrain.engine.state.manifest import (
    Manifest,
    check_batch,
    check_steps,
    read_manifest,
)
from colotrain.engine.state.other_settings import (
    begun_from,
    buffers_of_others,
    check_known,
    has_same_ranks,
    other_samples,
    restore_evaluations,
)
from colotrain.engine.state.pieces import (
    copied_pieces,
    held,
    parts_of,
    pieces_of,
    tensors_of,
    unchanged,
)
from colotrain.engine.state.plain_state import PLAIN
from colotrain.engine.state.run_state import Run
from colotrain.engine.state.shard_file import State
from colotrain.engine.state.whole_copy import Copied
from colotrain.errors import ColotrainError, UsageError
from colotrain.events.kinds import Note, Resumed
from colotrain.models import adapters, huggingface
from colotrain.records import to_plain
from colotrain.spec.optimizers import optimizer_of
from colotrain.spec.phases import Phase


def save(run: Run) -> None:
    """Begin to write a checkpoint of the steps done so far, unless it exists already.

    The end of a smoke run is not saved: its first step was, and that checkpoint was read back.
    """
    if not run.plan.checkpoint.enabled or run.saver.saved_step == run.step:
        return
    if run.plan.smoke and run.step == run.plan.train.max_steps:
        return
    run.at(Phase.CHECKPOINT)
    sources.tell_changed_files(run)
    # tensors on disk are not copied to memory but written before training continues
    background = not run.optimizer.streams
    run.saver.begin(state_of(run), background=background)
    run.saver.saved_step = run.step


def try_saving(run: Run) -> None:
    """Find state that cannot be saved right after the first update, not at the first save.

    All ranks must call.
    """
    if not run.plan.checkpoint.enabled or run.saver.can_be_saved:
        return
    run.optimizer.refuse_other_state()
    tensors_of(run)
    run.saver.can_be_saved = True


def finish_saving(run: Run) -> None:
    """Wait until the last checkpoint is written. All ranks must call.

    A failed save is an error here: the run ends and must not look as if it were saved.
    """
    run.at(Phase.CHECKPOINT)
    error = run.saver.wait()
    dist.barrier()  # rank 0 hosts the store and must not end before the others
    if error is not None:
        raise unsaved(run, run.saver.saved_step, error)


def unsaved(run: Run, step: int, problem: str) -> ColotrainError:
    """Return the error for a run that ends and whose last checkpoint could not be written."""
    return ColotrainError(
        f"checkpoint of step {step}: {problem}",
        f"see to it that {run.rundir.checkpoints} can be written and has room, then resume from "
        "the checkpoint before",
    )


def copy_to_memory(run: Run, *, again: bool = False) -> None:
    """Copy this rank's part of the state after `run.step` steps, where a copy is due.

    With `again` a copy is replaced that was made of the same step, before it was evaluated.
    """
    copies = run.copies
    if copies is None or not (copies.step == run.step if again else copies.is_due(run.step)):
        return
    run.at(Phase.MEMORY_COPY)
    started = time.perf_counter()
    try:
        if run.optimizer.streams:
            raise OSError("the state is on disk (plugin=gemini)")
        state = held(run)
        if copies.parts.keys() != state.keys():
            began = time.perf_counter()
            copies.parts = parts_of(run, tensors_of(run, unchanged(run)))
            started += time.perf_counter() - began  # later copies take as long as one another
        pieces = copied_pieces(run, state, copies.parts)
        manifest = manifest_of(run, progress_only=True)
        copies.take(State(pieces=pieces, manifest=manifest), started)
    except (ColotrainError, OSError) as error:  # state that is no plain data, or too little memory
        copies.end(str(error))
        run.copies = None


def finish_copy(run: Run) -> None:
    """Wait until the copy of the last step is whole (on a GPU it is made beside other work).

    Call it before the ranks meet: only then may one of them begin the next copy.
    """
    copies = run.copies
    if copies is None:
        return
    try:
        copies.finish()
    except OSError as error:
        copies.end(str(error))
        run.copies = None


def state_of(run: Run) -> State:
    """Return what this rank saves after `run.step` steps. All ranks must call."""
    return State(pieces=pieces_of(run), manifest=manifest_of(run))


def manifest_of(run: Run, *, progress_only: bool = False) -> Manifest:
    """Return everything but the tensors, as it is after `run.step` steps.

    With `progress_only` it is without what never changes while this launch lasts.
    """
    spared = tuple(sorted(unchanged(run)))
    return Manifest(
        step=run.step,
        optimizer_steps=run.optimizer.steps,
        micro_batches=run.history.micro_batches,
        loss_scale=run.loss_scale.scale if run.loss_scale.dynamic else None,
        clean_steps=run.loss_scale.clean_steps,
        world_size=dist.get_world_size(),
        plugin=run.plan.plugin.name,
        global_batch=run.plan.batch.global_batch,
        skipped_batches=run.history.skipped_batches,
        rollbacks=run.history.rollbacks,
        best_step=run.history.best[0] if run.history.best else None,
        best_value=run.history.best[1] if run.history.best else None,
        evaluations=run.history.evaluations,
        frozen=run.sharded.parts.frozen,
        plan={} if progress_only else to_plain(run.plan),
        versions={} if progress_only else _versions(),
        left_out=spared,
        began_with=began_with(run) if spared and not progress_only else {},
        beneath=adapters.changes_beneath(run.plan.model.adapter),
        sources=run.saver.sources,
        written_at=time.time(),
    )


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "numpy": np.__version__}
    try:
        found["colotrain"] = metadata.version("colotrain")
    except metadata.PackageNotFoundError:  # run from a source tree
        found["colotrain"] = "unknown"
    return found | {"python": platform.python_version()}


def step_of(path: Path | None) -> int:
    """Return the number of steps done in a checkpoint; 0 without one."""
    return read_manifest(path).step if path else 0


def restore(run: Run, path: Path) -> None:
    """Read a checkpoint into `run`. All ranks must call.

    The optimizer creates state that is not in the checkpoint at a parameter's next update; a model
    parameter that is missing is an error.
    """
    manifest, is_own = read_manifest(path), path.parent == run.rundir.checkpoints
    if not is_own:
        manifest = begun_from(run, manifest)
    check_batch(manifest, path, run.plan.batch.global_batch)
    check_steps(manifest, path, run.plan.train)
    index = read_index(path)
    if run.rank == 0:
        told = [*sources.warnings_of(run, manifest, other_samples(run, manifest))]
        told += buffers_of_others(run, manifest, index)
        rate = rate_warning(run.plan, manifest.plan, manifest.optimizer_steps)
        for text in told if rate is None else [*told, rate]:
            run.events.write(Note(text=f"warning: {path.name} {text}"))
    try:
        fill(run, path, manifest, index)
    except OSError as error:
        raise ColotrainError(f"{path}: {error}", "see the run's logs") from error
    if is_own:
        run.saver.saved_step = run.step
    if run.rank == 0:
        run.events.write(Resumed(step=run.step, path=str(path)))


def restore_copy(run: Run, copied: Copied) -> None:
    """Read a copy of the state in memory into `run`. All ranks must call."""
    if run.rank == 0:
        for text in sources.warnings_of(run, copied.manifest, []):
            run.events.write(Note(text=f"warning: the copy in memory {text}"))
    whole = replace(copied.manifest, plan=to_plain(run.plan))
    whole = replace(whole, began_with=began_with(run) if whole.left_out else {})
    fill(run, Path("memory"), whole, copied.index)
    if run.rank == 0:
        run.events.write(Resumed(step=run.step, path="", in_memory=True))


def fill(run: Run, path: Path, manifest: Manifest, stored: Index) -> None:
    """Set the whole state of `run`. All ranks must call. `path` stands in messages."""
    _refuse_other_classes(run, path, manifest)
    if same_ranks := has_same_ranks(run, manifest):
        stored = with_own(stored, run.rank)
    name = run.plan.optim.name
    same_optimizer = manifest.plan.get("optim", {}).get("name", name) == name
    _prepare_optimizer_(run, stored, same_optimizer=same_optimizer)
    wanted = tensors_of(run) | plain_state.as_stored(stored)
    check_known(run, path, stored, wanted)
    wanted = _without_skipped(run, path, manifest, wanted)
    missing = [
        name.removeprefix(PLAIN).removeprefix("model.")
        for name in wanted
        if name.removeprefix(PLAIN).startswith("model.") and name not in stored
    ]
    if missing:
        raise UsageError(
            f"{path}: holds no {missing[0]} ({len(missing)} missing)",
            "resume with the model that the checkpoint was made from",
        )
    run.saver.restored |= {
        name.removeprefix("model.") for name in stored if name.startswith("model.")
    }
    wanted = {name: tensor for name, tensor in wanted.items() if name in stored}
    load(wanted, parts_of(run, wanted), stored)
    _move_between_means_(run, manifest, stored)
    plain_state.restore(run, wanted, path, same_optimizer=same_optimizer)
    if same_ranks:
        prefix = f"rng.{run.rank}"
        states = {n.removeprefix(prefix): t for n, t in wanted.items() if n.startswith(prefix)}
        generators.set_states(run.device, states)
    _restore_progress(run, manifest)


def _refuse_other_classes(run: Run, path: Path, manifest: Manifest) -> None:
    """Raise `UsageError` where the rows of a trained head would stand for other classes."""
    then, now = manifest.plan.get("data", {}).get("classes") or [], run.plan.data.classes
    if then and now and [*then] != [*now]:
        section = "classify_tokens" if run.plan.data.classes_of_words else "classify"
        raise UsageError(
            f"{path}: its head knows {', '.join(then)}, not {', '.join(now)}",
            f"set train.{section}.classes=[{','.join(then)}], with data of these classes",
        )


def _prepare_optimizer_(run: Run, stored: Mapping[str, Any], *, same_optimizer: bool) -> None:
    """Make state for the parameters whose state is in the checkpoint; drop that of all others.

    Zeros would be wrong for the others, because not every optimizer begins with zeros. Another
    optimizer's state is of no use, even where names are the same, or a part is missing.
    """
    optimizer = run.optimizer
    names = [n.removeprefix(PLAIN) for n in stored]
    told = {n.removeprefix("optim.").rpartition(".")[0] for n in names if n.startswith("optim.")}
    optimizer.forget_state_(name for name in optimizer.parameters if name not in told)
    optimizer.prepare_state_(told)
    states, plain = optimizer.state(), optimizer.plain_state()
    foreign = [
        name
        for name, state in states.items()
        if not same_optimizer
        or any(f"optim.{name}.{key}" not in stored for key in state)
        or any(f"{PLAIN}optim.{name}.{key}" not in stored for key in plain[name])
    ]
    optimizer.forget_state_(foreign)
    if foreign and run.rank == 0:
        text = (
            f"warning: the checkpoint has no state of optim.name={run.plan.optim.name} for "
            f"{foreign[0]} ({len(foreign)} in all): it starts from zero"
        )
        run.events.write(Note(text=text))


@torch.no_grad()
def _move_between_means_(run: Run, manifest: Manifest, stored: Index) -> None:
    """Move parameters to where this run's optimizer has them, from where the checkpoint's had them.

    One that keeps a mean trains between the mean and `z`, at a place that its first beta tells; any
    other begins with the mean, and what is frozen from now on stays there. All ranks must call.
    """
    optim, then = run.plan.optim, manifest.plan.get("optim", {})
    if not optimizer_of(str(then.get("name"))).averages:
        return
    same = optim.name == then.get("name") and [*optim.betas][:1] == [*then["betas"]][:1]
    train = {f"optim.{name}.z" for name in run.optimizer.parameters}
    named = {f"optim.{name}.z": p.detach() for name, p in run.sharded.named_parameters()}
    held = {name: p for name, p in named.items() if not (same and name in train)}
    z = {name: torch.empty_like(p) for name, p in held.items() if name in stored}
    load(z, parts_of(run, z), stored)
    for name, tensor in z.items():
        local, parameter = local_part(tensor), local_part(held[name])
        mean = averaged(parameter, local, then["betas"][0])
        goes_on = run.optimizer.kind.averages and name in train
        parameter.copy_(torch.lerp(mean, local, 1 - optim.betas[0]) if goes_on else mean)


def began_with(run: Run) -> dict[str, Any]:
    """Return the settings that decide the values of parameters that never trained."""
    model = run.plan.model
    files = huggingface.fingerprint(Path(model.hf)) if model.hf else None
    seed = None if model.hf else run.plan.train.seed
    settings = {"target": model.target, "args": model.args}
    settings |= {"quantize": model.quantize} if model.quantize else {}
    return to_plain({**settings, "files": files, "seed": seed})


def _without_skipped(
    run: Run, path: Path, manifest: Manifest, wanted: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return `wanted` without parameters that the checkpoint leaves out; both runs began alike.

    Raises `UsageError` where they did not.
    """
    if manifest.beneath != adapters.changes_beneath(run.plan.model.adapter):
        raise UsageError(
            f"{path}: its adapters trained on weights that adapter.merge and adapter.init had not "
            "changed as they would now",
            "resume with these settings, and the merged directories, as they were",
        )
    spared = {f"model.{name}" for name in manifest.left_out}
    if spared and manifest.began_with != began_with(run):
        raise UsageError(
            f"{path}: holds only what trained, of a run that began with another model",
            "resume with the model, its arguments and the seed that it was made from",
        )
    return {name: tensor for name, tensor in wanted.items() if name not in spared}


def _restore_progress(run: Run, manifest: Manifest) -> None:
    run.step = manifest.step
    run.optimizer.steps = manifest.optimizer_steps
    run.history.micro_batches = manifest.micro_batches
    run.history.skipped_batches = manifest.skipped_batches
    run.history.rollbacks = max(run.history.rollbacks, manifest.rollbacks)
    restore_evaluations(run, manifest)
    if run.loss_scale.dynamic and manifest.loss_scale is not None:
        run.loss_scale.scale = manifest.loss_scale
        run.loss_scale.clean_steps = manifest.clean_steps
