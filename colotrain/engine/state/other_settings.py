"""A checkpoint of other settings, or of another model, mesh or run: what counts, what is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from colotrain.engine.state.manifest import Evaluations, Manifest
from colotrain.engine.state.plain_state import PLAIN
from colotrain.engine.state.run_state import Run
from colotrain.errors import UsageError
from colotrain.events.kinds import Note
from colotrain.records import to_plain
from colotrain.spec.axes import SAMPLES

AFRESH = "starts afresh: the checkpoint was made with another"
EVALUATED = (
    *("train.eval_steps", "train.metrics", "train.loss", "data.target", "data.args"),
    *("data.seq_len", "data.validation_fraction"),
)
"""Settings, beside a metric's, without which an evaluation's values are not comparable."""
HOW_IT_IS_READ = ("workers", "num_workers")
"""Settings of the data on which no sample depends."""


def begun_from(run: Run, manifest: Manifest) -> Manifest:
    """Return another run's manifest without what counts in that run alone.

    Its best checkpoint and its rollbacks are none of this run's. The evaluations in a row without
    an improvement count on, unless they would end this run before its first step.
    """
    rule, so_far = run.plan.train.stop_early, manifest.evaluations
    if rule is not None and so_far.waited >= rule.patience:
        _tell(run, "train.stop_early counts afresh: the other run was stopped by it")
        so_far = Evaluations(last_step=so_far.last_step)
    return replace(manifest, best_step=None, best_value=None, rollbacks=0, evaluations=so_far)


def restore_evaluations(run: Run, manifest: Manifest) -> None:
    """Take over the best values so far, where the run compares the same values as before."""
    best, so_far = (manifest.best_step, manifest.best_value), manifest.evaluations
    if changed := _changed(run, manifest, "checkpoint.best_metric", "checkpoint.best_mode"):
        if best[1] is not None:
            _tell(run, f"checkpoint.best {AFRESH} {changed}")
    elif best[0] is not None and best[1] is not None:
        run.history.best = best[0], best[1]
    early = "train.stop_early.metric", "train.stop_early.mode"
    if run.plan.train.stop_early and (changed := _changed(run, manifest, *early)):
        if so_far.best is not None:
            _tell(run, f"train.stop_early {AFRESH} {changed}")
        so_far = Evaluations(last_step=so_far.last_step)
    run.history.evaluations = so_far


def _changed(run: Run, manifest: Manifest, *keys: str) -> str:
    """Return the settings that decide an evaluation's values and differ from the checkpoint's."""
    now, then = to_plain(run.plan), manifest.plan
    return ", ".join(k for k in (*keys, *EVALUATED) if then and _at(now, k) != _at(then, k))


def _at(plan: Any, key: str) -> Any:
    for part in key.split("."):
        plan = plan.get(part) if isinstance(plan, dict) else None
    return plan


def buffers_of_others(run: Run, manifest: Manifest, stored: Mapping[str, Any]) -> Iterator[str]:
    """Say which buffers, different on the ranks that saved them, all have from the first rank."""
    differing = {n.split(".", 2)[2] for n in stored if n.startswith("rank.")}
    if differing and not has_same_ranks(run, manifest):
        names = sorted(n.removeprefix(PLAIN).removeprefix("model.") for n in differing)
        yield (
            f"was saved by ranks of another mesh, whose buffers differed: {names[0]} "
            f"({len(names)} in all) begin with those of the first rank"
        )


def other_samples(run: Run, manifest: Manifest) -> list[str]:
    """Return settings that decide the order of samples and differ from the checkpoint's."""
    now, then = to_plain(run.plan), manifest.plan
    keys = [("train", "seed"), *(("data", key) for key in (*now["data"], *then.get("data", {})))]
    if manifest.step * manifest.global_batch > len(run.train_data.samples):
        keys.append(("train", "last_batch"))  # the end of an epoch was passed
    return [
        f"{section}.{key}"
        for section, key in dict.fromkeys(keys)
        if key not in HOW_IT_IS_READ and now[section].get(key) != then.get(section, {}).get(key)
    ]


def check_known(
    run: Run, path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Tensor]
) -> None:
    """Refuse a checkpoint with parameters or buffers that the model lacks; stages have others'."""
    known = {f"model.{name}" for name in run.sharded.parts} | wanted.keys()
    lacked = [name for name in stored if name.startswith("model.") and name not in known]
    if lacked:
        name = lacked[0].removeprefix("model.")
        raise UsageError(
            f"{path}: holds {name}, which the model lacks ({len(lacked)} in all)",
            "resume with the model that the checkpoint was made from",
        )


def has_same_ranks(run: Run, manifest: Manifest) -> bool:
    """Whether the checkpoint has the same world size and the same sizes of pp, cp and tp.

    Only then does each rank restore its own random generators and buffers. Otherwise generators
    start from the seed again, and buffers that differed have the first rank's values.
    """
    then, mesh = manifest.plan.get("mesh", {}), run.plan.mesh
    alike = all(then.get(axis, 1) == getattr(mesh, axis) for axis in SAMPLES)
    return alike and manifest.world_size == dist.get_world_size()


def _tell(run: Run, text: str) -> None:
    if run.rank == 0:
        run.events.write(Note(step=run.step, text=text))
