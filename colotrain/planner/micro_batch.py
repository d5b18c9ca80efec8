"""Choice of the micro-batch and of what backward recomputes, where `auto` asks for it.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from colotrain.config.schema import Config
from colotrain.planner.machine import Machine
from colotrain.planner.scale import scale_out
from colotrain.spec.plan import RECOMPUTE, RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.quantities import format_seconds

MOST_TOKENS = {"cuda": 16_384, "cpu": 2_048}
"""Tokens of the largest micro-batch that is tried. More make no kernel of a GPU faster, and on a
CPU fewer stay in its caches."""
SIZE, WAY = "train.micro_batch", "train.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that take the place of `auto`, and why."""

    changes: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def choose(
    settings: Config, machine: Machine, changed_plan: Callable[[dict[str, Any]], RunPlan | None]
) -> Choice:
    """The fastest micro-batch and recomputation of those that surely fit; empty without `auto`.

    Of each kind of recomputation the largest micro-batch that fits is planned, for a larger one is
    never slower. A plan surely fits if the upper end of its peak's range does. Offloading is no
    choice of this search. Where nothing surely fits, or the memory of a rank or the activations are
    not known, it takes what needs least.
    """
    train = settings.train
    asked = {SIZE: train.micro_batch, WAY: train.activation_checkpointing}
    asks = {key for key, value in asked.items() if value == "auto"}
    if not asks or (SIZE in asks and train.global_batch is None):
        return Choice()  # without a global batch a size is missing, which is refused
    sizes: list[int | None] = [None if train.micro_batch == "auto" else train.micro_batch]
    if SIZE in asks and settings.accumulate.steps == "auto":
        sizes = [*_sizes(settings, machine)]
    else:
        asks -= {SIZE}  # the other sizes say it
    ways = RECOMPUTE if WAY in asks else (train.activation_checkpointing,)
    fitting: list[tuple[RunPlan, dict[str, Any]]] = []
    least: dict[str, Any] = {SIZE: sizes[-1], WAY: ways[-1]}
    for way in ways:
        for size in sizes:
            made = changed_plan(changes := {SIZE: size, WAY: way})
            if made is None and settings.mesh.pp == 1:
                break  # refused, of whatever size
            if made is not None:
                least[WAY] = way
            if made is not None and _surely_fits(made, settings):
                fitting.append((made, changes))
                break
        if fitting and fitting[0][1] == {SIZE: sizes[0], WAY: ways[0]}:
            break  # to recompute more is never faster
    if not fitting:
        return Choice(least, _chosen(least, asks, "nothing is known to fit; this needs least"))
    timed = all(plan.time.step_s for plan, _ in fitting)
    best, changes = min(fitting, key=lambda f: f[0].time.step_s) if timed else fitting[0]
    why = "the largest that surely fits with the least recomputation"
    if timed:
        why = f"the fastest that surely fits: {format_seconds(best.time.step_s)} a step"
    return Choice(changes, _chosen(changes, asks, why))


def _sizes(settings: Config, machine: Machine) -> Iterator[int]:
    """Divisors of a rank's part of the global batch, the largest first."""
    single = dataclasses.replace(settings.train, micro_batch=1)
    scale, batch = scale_out(dataclasses.replace(settings, train=single), machine, [])
    share = batch.share if batch else 1
    most = max(1, MOST_TOKENS[scale.device] // settings.data.seq_len) if batch else 1
    for size in range(min(share, most), 0, -1):
        if share % size == 0:
            yield size


def _surely_fits(plan: RunPlan, settings: Config) -> bool:
    lowers = ROWS[plan.plugin.name].packed and settings.plugin.name == "auto"
    memory = plan.cluster.memory_bytes
    known = memory > 0 and plan.memory.activations > 0
    return known and plan.peak.verdict(memory) == "yes" and not lowers


def _chosen(changes: dict[str, Any], asks: set[str], why: str) -> str:
    """`train.micro_batch=8 and train.activation_checkpointing=none: WHY`."""
    named = " and ".join(f"{key}={value}" for key, value in changes.items() if key in asks)
    return f"{named}: {why}" if named else ""
