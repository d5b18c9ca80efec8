"""A model as a sequence of blocks, and how pipeline stages divide it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSequence:
    """Blocks that a forward calls one after the other, and what is around them."""

    blocks: tuple[str, ...] = ()
    """Names of the blocks in the order of their calls; each takes what the one before returned."""
    num_returned: tuple[int, ...] = ()
    """Length of the tuple that each block returns; 0 where it returns the tensor itself."""
    before: tuple[str, ...] = ()
    """Parameters that are used before the first block."""
    after: tuple[str, ...] = ()
    """Parameters that are used after the last block; a tied one may be in both."""
    activation_numel: int = 0
    """Elements of what a block returns, for the micro-batch or sample of the trial."""
    activation_itemsize: int = 4
    """Bytes of each, unless a run computes in half precision."""
    against: str = ""
    """Why the model is no such sequence; empty where it is one."""

    def stages_of(self, name: str, split: Sequence[int]) -> tuple[int, ...]:
        """Return the stages, in ascending order, that need the parameter `name`."""
        found = {0} if name in self.before else set()
        found |= {len(split) - 1} if name in self.after else set()
        begin = 0
        for stage, count in enumerate(split):
            own = self.blocks[begin : begin + count]
            found |= {stage} if any(name.startswith(f"{block}.") for block in own) else set()
            begin += count
        return tuple(sorted(found)) or (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Parameters that multiply every token's activations: a forward's time is in proportion."""

    blocks: tuple[int, ...]
    after: int = field(default=0)
    """Those of the head; an embedding only looks its rows up."""


def balance(costs: Costs, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage for which the slowest stage is fastest.

    There are at least as many blocks as stages. Of equally good splits it is the one with most
    blocks on the first stages, where embeddings are and the last stage has the head.
    """
    num = len(costs.blocks)
    sums = [0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
        (1, first): (sums[num] - sums[first] + costs.after, (num - first,)) for first in range(num)
    }
    for left in range(2, stages + 1):
        for first in range(num - left + 1):
            options = []
            for end in range(first + 1, num - left + 2):
                rest, split = best[left - 1, end]
                options.append((max(sums[end] - sums[first], rest), (end - first, *split)))
            best[left, first] = min(
                options, key=lambda option: (option[0], [-n for n in option[1]])
            )
    return best[stages, 0][1]


def bubble(stages: int, micro_batches: int) -> float:
    """Return the part of a step for which a rank waits, with equal stages under 1F1B.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """
    return (stages - 1) / (micro_batches + stages - 1)


FORWARD_SHARE = 1 / 3
"""Part of a micro-batch's time that its forward takes: backward has two products for its one."""


def pipeline_time(costs: Sequence[float], micro_batches: int) -> float:
    """Return the seconds in which stages run a step's micro-batches by 1F1B.

    `costs` are each stage's seconds per micro-batch, forward and backward. The schedule is played.
    """
    played = min(micro_batches, 4 * len(costs))  # afterwards each takes as long as the slowest
    orders = [_order(len(costs) - 1 - stage, played) for stage in range(len(costs))]
    ended: dict[tuple[bool, int, int], float] = {}
    """(whether it is a forward, micro-batch, stage) → second at which it ends."""
    now, left = [0.0] * len(costs), [*range(len(costs))]
    while left:
        for stage in [*left]:
            while orders[stage]:
                is_forward, index = orders[stage][0]
                before = stage - 1 if is_forward else stage + 1
                needs = (is_forward, index, before) if 0 <= before < len(costs) else None
                if needs is not None and needs not in ended:
                    break
                orders[stage].popleft()
                share = FORWARD_SHARE if is_forward else 1 - FORWARD_SHARE
                begins = max(now[stage], ended[needs] if needs is not None else 0.0)
                now[stage] = ended[is_forward, index, stage] = begins + costs[stage] * share
            if not orders[stage]:
                left.remove(stage)
    return max(now) + (micro_batches - played) * max(costs)


def _order(ahead: int, micro_batches: int) -> deque[tuple[bool, int]]:
    """Return what a stage runs, with `ahead` forwards more than each stage behind it."""
    order: deque[tuple[bool, int]] = deque()
    for index in range(micro_batches + ahead):
        if index < micro_batches:
            order.append((True, index))
        if index >= ahead:
            order.append((False, index - ahead))
    return order
