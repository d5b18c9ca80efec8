"""Every plugin trains on a CUDA device as on the CPU: the same losses and gradients, no race."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from colotrain.spec.plugins import ROWS
from tests.representatives import (
    EVERY_COMBINATION,
    half_of_the_day,
    representatives,
    selected,
)
from tests.simulated.case import Case
from tests.simulated.running import SMALL, Found, Ranks, apart

FACTORS = {
    "plugin": tuple(ROWS),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "selective", "full"),
    "micro_batches": (1, 4),
    "trains": ("everything", "half", "adapters"),
    "ranks": (1, 2),
}
TRAINS = {
    "everything": (),
    "half": ("freeze.patterns=[embed*,blocks.0.*,'*.attention.query.weight']",),
    "adapters": ("adapter.name=lora", "adapter.targets=[blocks.*]"),
}
TOLERANCE = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 0.1), "fp16": (2e-3, 0.02)}
"""Of losses, and of gradients relative to their norms."""


class Setting(NamedTuple):
    """One value of each factor."""

    plugin: str
    precision: str
    recompute: str
    micro_batches: int
    trains: str
    ranks: int

    def case(self) -> Case:
        words = (
            *SMALL,
            *TRAINS[self.trains],
            f"plugin={self.plugin}",
            f"train.precision={self.precision}",
            f"train.activation_checkpointing={self.recompute}",
            f"train.micro_batch={8 // self.ranks // self.micro_batches}",
            "train.max_steps=2",
        )
        return Case(name="-".join(map(str, self)), words=words)

    def reference(self) -> Case:
        """The same on the CPU, in one process, with nothing sharded or recomputed."""
        like = Setting("zero1", self.precision, "none", 4, self.trains, 1)
        name = f"cpu-{self.precision}-{self.trains}"
        return Case(name=name, words=like.case().words, on="cpu")


EVERY = [Setting(*values) for values in itertools.product(*FACTORS.values())]


def pairs(setting: Setting) -> set[tuple[int, object, int, object]]:
    return {(i, setting[i], j, setting[j]) for i, j in itertools.combinations(range(6), 2)}


def pairwise() -> list[Setting]:
    """Few settings in which every two values of two factors meet."""
    missing, chosen = set().union(*map(pairs, EVERY)), list[Setting]()
    while missing:
        best = max(EVERY, key=lambda setting: len(pairs(setting) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def carried_out(settings: list[Setting], folder: Path, guard: Path) -> dict[str, Found]:
    references = {setting.reference() for setting in settings}
    alone = [*references, *(s.case() for s in settings if s.ranks == 1)]
    both = [s.case() for s in settings if s.ranks == 2]
    first = Ranks(alone, folder / "1", guard, ranks=1)
    second = Ranks(both, folder / "2", guard, ranks=2)
    return first.finish() | second.finish()


def check(setting: Setting, found: dict[str, Found]) -> None:
    run = found[setting.case().name]
    losses, gradients = apart(run, found[setting.reference().name])
    assert run.races == []
    assert (losses, gradients) <= TOLERANCE[setting.precision]
    assert gradients <= TOLERANCE[setting.precision][1]


def of_every_value(settings: list[Setting]) -> list[Setting]:
    """Few of the settings, in which every value of every factor occurs."""
    missing, chosen = {(i, value) for s in settings for i, value in enumerate(s)}, list[Setting]()
    while missing:
        best = max(settings, key=lambda setting: len({*enumerate(setting)} & missing))
        chosen.append(best)
        missing -= {*enumerate(best)}
    return chosen


@pytest.fixture(scope="module")
def found(
    guard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Found]:
    settings = sorted(setting for (setting,) in selected(request, "setting"))
    return carried_out(settings, tmp_path_factory.mktemp("matrix"), guard)


@pytest.mark.parametrize(
    "setting",
    representatives(pairwise(), kept=of_every_value(pairwise())),
    ids=lambda setting: setting.case().name,
)
def test_a_run_on_the_device_is_that_on_the_cpu(setting: Setting, found: dict[str, Found]) -> None:
    check(setting, found)


def more_of(plugin: str) -> list[Setting]:
    """Two of four settings that the pairs above do not have; with EVERY_COMBINATION=1 all of them,
    which take an hour."""
    left = sorted(set(EVERY) - set(pairwise()))
    settings = [setting for setting in left if setting.plugin == plugin]
    if EVERY_COMBINATION:
        return settings
    return half_of_the_day(random.Random(plugin).sample(settings, 4), of=plugin)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plugin", list(ROWS))
def test_so_are_combinations_of_more_than_two(plugin: str, guard: Path, tmp_path: Path) -> None:
    settings = more_of(plugin)
    found = carried_out(settings, tmp_path, guard)
    for setting in settings:
        check(setting, found)
