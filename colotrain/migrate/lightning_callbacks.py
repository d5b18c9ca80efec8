"""Callbacks in Lightning's YAML configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from colotrain.migrate.findings import Answer, Finding, Flat, number, taken, whole

CHECKPOINTS = "checkpoints are whole or absent, and the last good one is kept"
SHOWN = "`colotrain dashboard` shows it"
VALIDATION_LOSS = ("val_loss", "val/loss", "valid_loss", "validation_loss")
"""Usual names, in Lightning modules, of the loss of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A callback that watches a metric."""

    section: str
    """Section of colotrain's configuration with `metric` and `mode`."""
    needs: tuple[str, ...]
    """Settings that must not be 0."""
    numbers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further arguments of the same names on both sides → conversion."""


MONITORS = {
    "ModelCheckpoint": Monitor(
        section="checkpoint.best", needs=("train.eval_steps", "checkpoint.every")
    ),
    "EarlyStopping": Monitor(
        section="train.stop_early",
        needs=("train.eval_steps",),
        numbers={"patience": whole, "min_delta": number},
    ),
}


def callback(value: Any, _: Flat) -> Answer:
    name = str(value).rpartition(".")[2]
    if name == "ModelCheckpoint":
        return Answer(outcome="decided", note=CHECKPOINTS)
    if name in ("LearningRateMonitor", "DeviceStatsMonitor", "RichProgressBar", "TQDMProgressBar"):
        return Answer(outcome="decided", note=SHOWN)
    if name in ("RichModelSummary", "ModelSummary"):
        return Answer(outcome="decided", note="`colotrain plan` shows it")
    if name == "EarlyStopping":
        return Answer(outcome="taken", note="train.stop_early, from its arguments")
    if name == "GradientAccumulationScheduler":
        return Answer(outcome="none", note="accumulation is the same in every step")
    return Answer(outcome="none", note="per step, your code is called by train.on_gradients")


def kept(value: Any, _: Flat) -> Answer:
    """Number of checkpoints to keep: Lightning keeps the best, colotrain the newest."""
    if whole(value) < 1:
        there = "keeping all is not available" if whole(value) else "there none are saved"
        return Answer(outcome="none", note=f"{there}: checkpoint.keep says how many are kept")
    note = "the newest are kept, not the best: checkpoint.best.metric keeps one more, the best"
    return taken("checkpoint.keep", whole, note)(value, {})


def with_monitors(found: Sequence[Finding]) -> list[Finding]:
    """Translate the arguments of callbacks that watch a metric."""
    for name, monitor in MONITORS.items():
        found = _translated(found, name, monitor)
    return list(found)


def _translated(found: Sequence[Finding], name: str, watched: Monitor) -> list[Finding]:
    values = {finding.key: finding.value for finding in found}
    settings = {key: value for finding in found for key, value in finding.settings.items()}
    off = next((key for key in watched.needs if settings.get(key) == 0), "")
    callbacks = [
        key.removesuffix("class_path") + "init_args."
        for key, value in values.items()
        if key.startswith("trainer.callbacks") and str(value).endswith(name)
    ]
    monitors = [values[f"{c}monitor"] for c in callbacks if values.get(f"{c}monitor") is not None]

    def translated(finding: Finding) -> Finding:
        owner, _, argument = finding.key.rpartition("init_args.")
        known = ("monitor", "mode", *watched.numbers)
        if f"{owner}init_args." not in callbacks or argument not in known:
            return finding
        monitor = values.get(f"{owner}init_args.monitor")
        if monitor is None:
            return replace(finding, outcome="decided", note="no metric is monitored")
        if off:
            return replace(finding, note=f"{off}=0 leaves nothing to compare")
        if monitor != monitors[0]:
            note = f"one metric is monitored: {monitors[0]}, or set {watched.section}"
            return replace(finding, outcome="asked", note=note)
        if argument in watched.numbers:
            key = f"{watched.section}.{argument}"
            its = taken(key, watched.numbers[argument])(finding.value, {})
            return replace(finding, outcome=its.outcome, note=its.note, settings=its.settings)
        if argument == "mode":
            mode = {f"{watched.section}.mode": finding.value}
            return replace(finding, outcome="taken", note="", settings=mode)
        if monitor in VALIDATION_LOSS:
            metric = {f"{watched.section}.metric": "validation_loss"}
            note = "the loss of evaluations"
            return replace(finding, outcome="taken", note=note, settings=metric)
        note = f"set {watched.section}.metric to the metric's name in what your forward returns"
        return replace(finding, outcome="asked", note=note)

    return [translated(finding) for finding in found]
