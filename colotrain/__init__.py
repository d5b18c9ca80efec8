"""colotrain: change the plugin, and nothing else changes.

The Python API is as small as the command line, and as lazy: importing it loads no torch.

    import colotrain

    plan = colotrain.resolve(["recipe=llm-tiny", "plugin=zero3"])

    def on_gradients(model, step):                  # train.on_gradients=mymodule:on_gradients
        for view in colotrain.gradients(model):
            print(view.name, view.status, view.norm)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from colotrain.engine.gradients import GradView
    from colotrain.observe.view import RunView
    from colotrain.plan import RunPlan

__version__ = "0.1.0"
__all__ = ["gradients", "read_run", "resolve"]


def resolve(overrides: Sequence[str]) -> RunPlan:
    """The run plan that `overrides` describe; raises `ConfigError` with every problem."""
    from colotrain.cli.resolving import plan_from

    return plan_from(overrides)


def read_run(name: str | None = None) -> RunView:
    """What the run `name` (a name under ./runs, or a folder; default: the newest) has done."""
    from colotrain.observe.fold import follow
    from colotrain.rundir import RunDir

    return follow(RunDir.find(name))


def gradients(model: nn.Module) -> Iterator[GradView]:
    """One view per parameter of a model that colotrain trains, in the order of the model.

    Readable from the last backward of a step until the next step's first backward, so in
    `train.on_gradients`. Every rank may iterate; `GradView.full()` is collective.
    """
    from colotrain.engine.gradients import read

    return read(model)
