"""Steps that are not finite: the search for the origin, skipping them, and rolling back.

A rollback goes to the last good checkpoint and skips the batches since. PaLM (Chowdhery et al.
2022, section 5.1) did so: it went back about 100 steps before a loss spike and skipped the batches
around it. The same weights then do not see the same data again, so the spike need not come back.
"""

from __future__ import annotations

import math

from colotrain import module_tree
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.nonfinite import describe, locate
from colotrain.engine.model.freezing import BY_MODEL, freeze_
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state import checkpoint
from colotrain.engine.state.checkpoint import copy_to_memory
from colotrain.engine.state.choosing import choose
from colotrain.engine.state.manifest import read_manifest
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.participant import Agreed
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Nonfinite, Note, Rollback
from colotrain.spec.phases import Phase


def skip_(run: Run, agreed: Agreed) -> bool:
    """Leave out a step that is not finite, on every rank; returns whether the run goes on after it.

    It does where fp16 or the plan says so; else the run is rolled back, or ends before the step can
    harm the weights.
    """
    search = not run.loss_scale.can_fall
    if search:
        _search(run, agreed)
    run.loss_scale.update(overflow=True)
    if search and run.plan.train.on_nonfinite == "rollback":
        roll_back_(run)
        return False
    return True


def _search(run: Run, agreed: Agreed) -> None:
    """Find where a loss or gradient stopped being finite; end the run if the plan says so."""
    micro_batches = range(run.plan.batch.accumulation_steps)
    ids = [run.train_data.ids(run.batch_index, index) for index in micro_batches]
    with agreed.batches.again(phase=Phase.NONFINITE_SEARCH) as batches:
        origin = locate(run.gradients, batches, ids, step=run.step + 1, nominal=run.targets.nominal)
    gradients.clear_(run.sharded.module)
    where = f"it began in {describe(origin)}" if origin else "a second pass was clean"
    problem = f"step {run.step + 1}: loss {agreed.loss}, gradient norm {agreed.grad_norm}; {where}"
    if run.rank == 0:
        run.events.write(origin or Nonfinite(step=run.step + 1))
        run.events.write(Note(text=problem))
    if run.plan.train.on_nonfinite == "stop":
        paired = run.plan.data.pairs or run.plan.data.rated  # which exclude a rollback
        fix = "lower optim.lr, or set train.on_nonfinite=skip" + " or rollback" * (not paired)
        if origin is not None and origin.input is not None:
            fix = "correct or leave out these samples, or set train.on_nonfinite=skip"
            raise ColotrainError(problem, fix)
        if run.loss_scale.dynamic and not math.isfinite(agreed.loss):
            fix = f"let the model compute its loss in float32 (logits.float()), {fix}"
        raise ColotrainError(problem, fix)


def roll_back_(run: Run) -> None:
    """Restore the newest good checkpoint and skip every batch since. All ranks must call.

    The step that was not finite has not changed the weights. More than `train.max_rollbacks`
    rollbacks are an error, and so is having no checkpoint.
    """
    run.at(Phase.ROLLBACK)
    offending, most = run.batch_index, run.plan.train.max_rollbacks
    if run.history.rollbacks >= most:
        raise ColotrainError(
            f"step {run.step + 1}: not finite again after {most} rollbacks",
            "lower optim.lr or clip harder (train.grad_clip); train.max_rollbacks allows more",
        )
    run.saver.wait()
    path = choose(run.rundir.checkpoints, run.events)
    if path is None:
        raise ColotrainError(
            f"step {run.step + 1}: no checkpoint to go back to", "set checkpoint.every lower"
        )
    left_at = run.step
    gradients.clear_(run.sharded.module)
    manifest = read_manifest(path)
    for name, parameter in module_tree.named_parameters(run.sharded.module):
        if manifest.frozen.get(name) == BY_MODEL:
            parameter.requires_grad_(False)
    freeze_as_of(run, manifest.step)
    checkpoint.restore(run, path)
    run.history.rollbacks += 1
    run.history.skipped_batches = offending + 1 - run.step
    if run.copies is not None:
        run.copies.clear()  # later steps, which must not come back
        copy_to_memory(run)
    if run.rank == 0:
        text = (
            f"rollback {run.history.rollbacks} of at most {most}: back from step {left_at + 1} to "
            f"step {run.step}; batches passed over: {left_at + 1 - run.step}"
        )
        run.events.write(Rollback(step=run.step, left_at=left_at + 1, text=text))
        run.events.write(Note(text=text))


def freeze_as_of(run: Run, step: int) -> None:
    """Train exactly the parameters that the plan's schedule trains in `step`."""
    reshard(run.sharded)
    model, optimizer = run.sharded.module, run.optimizer
    run.sharded.parts.freeze(freeze_(model, run.plan.freeze, step=step))
    training = run.sharded.trained()
    optimizer.drop([name for name in optimizer.parameters if name not in training])
    optimizer.add({n: p for n, p in training.items() if n not in optimizer.parameters})
    for group in run.sharded.groups:
        group.refresh_dtypes()
