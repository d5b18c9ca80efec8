"""A model as a sequence of blocks, and how pipeline stages divide it."""

from __future__ import annotations

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

    def chunks_of(self, name: str, split: Sequence[int]) -> tuple[int, ...]:
        """Return the chunks of the model, in ascending order, that need the parameter `name`.

        `split` are the chunks' numbers of blocks.
        """
        found = {0} if name in self.before else set()
        found |= {len(split) - 1} if name in self.after else set()
        begin = 0
        for chunk, count in enumerate(split):
            own = self.blocks[begin : begin + count]
            found |= {chunk} if any(name.startswith(f"{block}.") for block in own) else set()
            begin += count
        return tuple(sorted(found)) or (0,)

    def stages_of(self, name: str, split: Sequence[int], chunks: int = 1) -> tuple[int, ...]:
        """Return the stages that need a parameter, where each has every N-th of N · `chunks`."""
        stages = len(split) // chunks
        return tuple(sorted({chunk % stages for chunk in self.chunks_of(name, split)}))

    def blocks_of(self, chunk: int, split: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the blocks of one chunk of the model."""
        begin = sum(split[:chunk])
        return self.blocks[begin : begin + split[chunk]]


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
