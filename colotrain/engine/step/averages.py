"""The mean of parameters over all steps, for evaluations, where an optimizer keeps one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from colotrain.engine.gradients import gradients
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run


@contextmanager
def averaged_parameters(run: Run) -> Iterator[None]:
    """Give parameters the mean of the optimizer's iterates, where it has one. All ranks must call.

    Training's own values are kept beside them, and put back to the last bit; the gradients of the
    step before, which nobody reads any more, are freed for them. What is saved meanwhile is what
    training goes on with.
    """
    if not run.optimizer.kind.averages:
        yield
        return
    run.saver.before_update()  # a save in the background reads what changes now
    reshard(run.sharded)
    gradients.clear_(run.sharded.module)
    run.optimizer.average_()
    yield
    reshard(run.sharded)
    dist.barrier()  # others may still read this rank's rows
    run.optimizer.put_back_()
