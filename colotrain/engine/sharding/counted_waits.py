"""Counts for how long a rank on a CPU waits for others in the process group's collectives.

Sending and receiving is counted, too: it takes all ranks of a group about as long, so that what is
left of a step tells ranks apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from colotrain.engine.comms.waiting import waiting
from colotrain.engine.sharding.fsdp_internals import DefaultAllGather
from colotrain.engine.sharding.sharded_model import ShardedModel


class CountedAllGather(DefaultAllGather):
    """`fully_shard`'s own all-gather."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with waiting():
            return super().__call__(*args, **kwargs)


def count_waits_(sharded: ShardedModel) -> None:
    """Count all-gathers and reductions of a model whose ranks are not all of one host."""
    for group in sharded.groups:
        group.handle.set_custom_all_gather(CountedAllGather())
        for params in group.fsdp_groups:
            params.post_backward = partial(_post_backward, params)


def _post_backward(params: Any, *unused: Any) -> None:
    """Reduce a group's gradients; copying them together, which belongs to it, takes far less."""
    with waiting():
        type(params).post_backward(params, *unused)
