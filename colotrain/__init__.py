"""colotrain: change the plugin, and nothing else changes.

The Python API is as small as the command line, and lazy: importing it imports no torch.

    import colotrain

    plan = colotrain.resolve(["recipe=llm-tiny", "plugin=zero3"])
    summary = colotrain.run(["recipe=llm-tiny", "plugin=zero3", "name=first"])
    view = colotrain.read_run("first")              # loss, gradients, memory, throughput

    def on_gradients(model, step):                  # train.on_gradients=mymodule:on_gradients
        for view in colotrain.gradients(model):
            print(view.name, view.status, view.norm)
"""

from __future__ import annotations

from contextlib import contextmanager

TYPE_CHECKING = False  # importing `typing` would be half of the time until `__main__` begins
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch import nn

    from colotrain.engine.gradients.gradients import GradView
    from colotrain.events.view import RunView
    from colotrain.spec.plan import RunPlan

__version__ = "0.1.0"
__all__ = ["gradients", "read_run", "resolve", "run"]


def resolve(overrides: Sequence[str]) -> RunPlan:
    """Return the run plan of `overrides`; raise `ConfigError` with all problems.

    The user's modules are imported in another process, as they stand in their files: a run that
    begins now trains the same.
    """
    with _keep_callers_state():
        from colotrain.runs.resolving import plan_apart

        return plan_apart(overrides)


def run(overrides: Sequence[str], *, progress: bool = False, force: bool = False) -> dict[str, Any]:
    """Train the run of `overrides` here to the end; return the content of `summary.json`.

    Its `status` tells a run that was stopped from one that finished. A run that fails raises
    `ColotrainError` with the first cause; a plan that does not fit raises `DoesNotFit` (unless
    `force`). With `progress`, the run's progress is shown on stderr. Call it in the main thread,
    and under `if __name__ == "__main__"` where settings name what the script itself defines.
    """
    from colotrain.callers_script import refuse_run_in_import

    refuse_run_in_import()
    _refuse_threads()
    with _keep_callers_state():
        from colotrain.runs.start import run_quietly

        return run_quietly(list(overrides), progress=progress, force=force)


def read_run(name: str | None = None) -> RunView:
    """Return the state of a run, given by its name under ./runs or its folder; None: the newest."""
    from colotrain.events.fold import follow
    from colotrain.events.liveness import find

    return follow(find(name))


def gradients(model: nn.Module) -> Iterator[GradView]:
    """Yield one view per parameter of a model that colotrain trains, in the model's order.

    The views are readable from the last backward of a step until the next step's first backward,
    for example in `train.on_gradients`. Every rank may iterate; `GradView.full()` is collective.
    """
    from colotrain.engine.gradients.gradients import read

    return read(model)


@contextmanager
def _keep_callers_state() -> Iterator[None]:
    """Give the caller back its random numbers, which `rich` draws, and its environment."""
    import os
    import random

    numbers, environment = random.getstate(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(numbers)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _refuse_threads() -> None:
    import threading

    if threading.current_thread() is threading.main_thread():
        return
    from colotrain.errors import UsageError

    raise UsageError(
        "colotrain.run was called in a thread, where no signal can be handled",
        "call it in the main thread, or start `colotrain run` as a process",
    )
