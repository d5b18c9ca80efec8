"""The cases that a verification runs.

They are plugins × world sizes × mesh axes × accumulation × freeze sets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colotrain.spec.axes import EP, SAMPLES, MeshPlan
from colotrain.spec.pipeline_schedule import DEFAULT_CHUNKS
from colotrain.spec.survey import ParameterInfo

AXES = (*SAMPLES, EP)
"""The axes that a case has a size of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case: changes to the user's configuration."""

    plugin: str
    world_size: int
    pp: int = 1
    """Stages of the model; pp × cp × tp divides the world size."""
    cp: int = 1
    """Ranks that divide each sample."""
    tp: int = 1
    """Ranks that divide each matrix."""
    ep: int = 1
    """Ranks that divide each layer's experts."""
    accumulation_steps: int
    freeze: tuple[str, ...] | None
    """Patterns to freeze; None leaves the user's own freeze section."""

    @property
    def readers(self) -> int:
        """Groups of ranks that work on the same samples; 0 if the axes do not divide the ranks."""
        return MeshPlan(pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep).readers(self.world_size)

    def apply(
        self, config: dict[str, Any], *, global_batch: int, steps: int, resumes: bool = False
    ) -> dict[str, Any]:
        """The user's configuration changed to this case, without restarts.

        It has checkpoints where it is to stop in the middle and to go on.
        """
        train = config.get("train") or {}
        plugin = config.get("plugin") or {}
        own = {**plugin, "name": self.plugin} if plugin.get("name") == self.plugin else None
        micro_batch = global_batch // (self.accumulation_steps * self.readers)
        axes = f"{self.world_size}-{self.pp}-{self.cp}-{self.tp}-{self.ep}"
        mesh = config.get("mesh") or {}
        split, parts = mesh.get("pp_split") or [], self.pp
        if mesh.get("pp_schedule") == "interleaved":
            parts *= mesh.get("pp_chunks") or DEFAULT_CHUNKS
        changed = {
            "name": f"verify-{self.plugin}-{axes}-{self.accumulation_steps}",
            "plugin": own or {"name": self.plugin},
            "mesh": {
                **mesh,
                **{axis: getattr(self, axis) for axis in AXES},
                "pp_split": split if len(split) == parts and self.pp > 1 else [],
            },
            "train": {
                **train,
                "global_batch": global_batch,
                "micro_batch": micro_batch,
                "max_steps": steps,
                "epochs": None,
                "eval_every": None,
                "eval_steps": 1,
                "on_gradients": None,
                "stop_early": {},
                "on_nonfinite": "stop",  # there is no checkpoint to roll back to
            },
            "data": {**(config.get("data") or {}), "num_workers": 0},  # as in the reference
            "accumulate": {"steps": self.accumulation_steps},
            "cluster": {
                **(config.get("cluster") or {}),
                "procs_per_node": self.world_size,
                "nodes": 1,
            },
            "checkpoint": {"every": steps if resumes else 0},
            "elastic": {"max_restarts": 0},
        }
        if self.freeze is not None:
            changed["freeze"] = {"patterns": list(self.freeze)}
        return {**config, **changed}


def all_cases(
    *,
    plugins: Sequence[str],
    world_sizes: Sequence[int],
    axes: Mapping[str, Sequence[int]],
    accumulation: Sequence[int],
    freezes: Sequence[tuple[str, ...] | None],
) -> Iterator[Case]:
    """All combinations, but those with world sizes that the product of the axes does not divide.

    `axes` has the sizes of axes of the mesh by name; others have the size 1.
    """
    for world_size, sizes, freeze, steps, plugin in itertools.product(
        world_sizes, itertools.product(*axes.values()), freezes, accumulation, plugins
    ):
        case = Case(
            plugin=plugin,
            world_size=world_size,
            **dict(zip(axes, sizes, strict=True)),
            accumulation_steps=steps,
            freeze=freeze,
        )
        if case.readers:
            yield case


def freeze_sets(parameters: Sequence[ParameterInfo], *, own: bool) -> list[tuple[str, ...] | None]:
    """The user's freeze set if there is one; else nothing, the first third, and every third."""
    if own:
        return [None]
    names = [p.name for p in parameters if p.frozen_by is None]
    sets = [(), tuple(names[: len(names) // 3]), tuple(names[1::3])]
    return list(dict.fromkeys(s for s in sets if len(s) < len(names)))


def batch_size(world_sizes: Sequence[int], accumulation: Sequence[int]) -> int:
    """Smallest number of samples per step that every case can split into equal micro-batches.

    More samples would prove nothing more.
    """
    return math.lcm(*(size * steps for size in world_sizes for steps in accumulation))
