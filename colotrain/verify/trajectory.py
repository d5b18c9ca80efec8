"""What a verification compares: the values of a few steps of training, and the files of a case."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colotrain.rundir import RunDir

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Losses, gradients and parameters of a few steps of training; index k is step k."""

    losses: list[float]
    gradients: list[Tensors]
    """Name → whole gradient before clipping; parameters without one are absent."""
    parameters: list[Tensors]
    """Name → value, before the first step and after each."""
    optimizer_steps: int
    frozen: frozenset[str]
    evaluation: dict[str, float] = field(default_factory=dict)
    """Loss and metrics of the evaluation after the last step; empty where there is none."""
    rounding: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Kind ("gradients" or "parameters") → step → name → error of plain torch in its own dtype."""
    draws: bool = False
    """Whether the model's forward draws random numbers other than dropout's."""
    mixes: str = ""
    """Name of the first module or buffer by which the samples of a micro-batch depend on one
    another, as by batch normalization; empty where there is none."""
    no_mean: str = ""
    """Why the loss is no mean over targets; empty where it is one, or nothing is known."""
    computed_in: frozenset[torch.dtype] = frozenset()
    """Dtypes of the forward's results with the model in its own dtype, autocast's included."""
    not_exact: str = ""
    """Why this is no computation in float64; empty where it is one."""


def save(trajectory: Trajectory, case: RunDir) -> None:
    """Write what a case is compared by: its tensors as safetensors, the rest as JSON."""
    kinds = (("gradient", trajectory.gradients), ("parameter", trajectory.parameters))
    tensors = {
        f"{kind}.{step}.{name}": tensor.contiguous()
        for kind, steps in kinds
        for step, values in enumerate(steps)
        for name, tensor in values.items()
    }
    save_file(tensors, case.trajectory_file)
    facts = {
        "losses": trajectory.losses,
        "evaluation": trajectory.evaluation,
        "optimizer_steps": trajectory.optimizer_steps,
        "frozen": sorted(trajectory.frozen),
    }
    case.verification_file.write_text(json.dumps(facts), "utf-8")


def load(case: RunDir) -> Trajectory:
    """Read what `save` wrote."""
    facts = json.loads(case.verification_file.read_text("utf-8"))
    values: dict[str, dict[int, Tensors]] = {"gradient": {}, "parameter": {}}
    for key, tensor in load_file(case.trajectory_file).items():
        kind, step, name = key.split(".", 2)
        values[kind].setdefault(int(step), {})[name] = tensor
    gradients, parameters = values["gradient"], values["parameter"]
    return Trajectory(
        losses=facts["losses"],
        evaluation=facts["evaluation"],
        gradients=[gradients.get(step, {}) for step in range(len(facts["losses"]))],
        parameters=[parameters[step] for step in sorted(parameters)],
        optimizer_steps=facts["optimizer_steps"],
        frozen=frozenset(facts["frozen"]),
    )
