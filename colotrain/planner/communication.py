"""Collectives of a step and the bytes they send. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from colotrain.planner.groups import (
    Group,
    fetched_ahead,
    find,
    reached_by_backward,
    shard_numel,
)
from colotrain.planner.layout import Layout
from colotrain.spec.divisions import SUM_BYTES
from colotrain.spec.optimizers import (
    is_in_a_layer,
    newton_schulz_flops,
    optimizer_of,
    rounds_of,
)
from colotrain.spec.survey import Survey, Trace

HALF_BYTES = 2
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one step. Bytes are what one rank sends, with ring algorithms."""

    gathers: int
    reductions: int
    reduced: str
    """`once a step` or `every micro-batch`."""
    gathered_bytes: float
    """Bytes sent in all-gathers."""
    reduced_bytes: float
    """Bytes sent in reduce-scatters."""
    replicated_bytes: float
    """Bytes sent in all-reduces between replicas."""
    calls: int
    """Number of times that groups are gathered or reduced, counted for a single rank, too."""
    gathered_whole: float
    """Bytes that arrive in all-gathers, the rank's own included; each is copied twice."""
    reduced_whole: float
    inner_calls: int = 0
    inner_bytes: float = 0.0
    """Bytes sent inside layers, between ranks that divide samples or matrices."""
    inner_whole: float = 0.0
    """The same with the rank's own."""
    owned_calls: int = 0
    """Exchanges of matrices with the ranks that compute on them, in an update."""
    owned_bytes: float = 0.0
    """Bytes sent in them: rows of matrices, and of results."""
    summed_calls: int = 0
    """Collectives that sum gradients of which ranks that divide experts have parts."""
    summed_bytes: float = 0.0
    """Bytes sent in them, once a step."""
    summed_whole: float = 0.0
    """The same with the rank's own."""
    passed_bytes: int = 0
    """Bytes of activations and their gradients sent to neighbouring pipeline stages."""

    @property
    def bytes_per_step(self) -> int:
        reduced = self.reduced_bytes + self.replicated_bytes
        inside = self.inner_bytes + self.owned_bytes + self.summed_bytes
        return round(self.gathered_bytes + reduced + inside) + self.passed_bytes


def traffic(layout: Layout, survey: Survey, trace: Trace | None = None) -> Traffic:
    """Collectives and bytes of a step.

    A ring of n ranks sends (n - 1) / n of the whole per all-gather or reduce-scatter, and twice
    that per all-reduce (Patarasuk and Yuan 2009). Kept parameters are gathered once a step; freed
    ones for each forward, and again for each backward that reaches them. The root group's stay
    gathered in between. A pass before the step gathers them as a step's forwards do.
    """
    groups = find(survey, trace, layout)
    steps, ring = layout.accumulation_steps, (layout.shard - 1) / layout.shard
    reductions = steps if layout.gradients == "sharded" else 1
    uses = dict(_uses(groups, trace, steps))
    pieces = {name: group.pieces for name, group in groups.items()}
    calls = sum(num * pieces[name] for name, num in uses.items())
    reduced = reductions * sum(g.trained_pieces for g in groups.values() if g.reduced_bytes)
    replicas, exchanges = layout.replicas, trace.exchanges if trace else ()
    whole = sum(g.reduced_bytes for g in groups.values())
    updates, experts = owned_matrices(layout, survey), layout.expert_ranks
    sums, summed = _sums_of_dense(layout, survey) if experts > 1 else (0, 0.0)
    gathered = sum(uses[name] * group.gathered_bytes for name, group in groups.items())
    return Traffic(
        gathers=calls if layout.shard > 1 else 0,
        reductions=reduced if layout.shard > 1 else 0,
        reduced="every micro-batch" if layout.gradients == "sharded" else "once a step",
        gathered_bytes=ring * gathered,
        reduced_bytes=ring * reductions * whole,
        replicated_bytes=2 * (replicas - 1) / replicas * whole / layout.shard,
        calls=calls + reduced,
        gathered_whole=float(gathered),
        reduced_whole=float(reductions * whole),
        inner_calls=steps * sum(exchange.calls for exchange in exchanges),
        inner_bytes=steps * sum(exchange.sent_bytes for exchange in exchanges),
        inner_whole=float(steps * sum(e.whole_bytes for e in exchanges)),
        owned_calls=updates.calls,
        owned_bytes=updates.sent_bytes,
        summed_calls=sums,
        summed_bytes=(experts - 1) / experts * summed,
        summed_whole=summed,
        passed_bytes=sum(layout.passed_bytes),
    )


def _sums_of_dense(layout: Layout, survey: Survey) -> tuple[int, float]:
    """Return the collectives that sum all gradients but experts', and their whole bytes.

    A sum scatters and gathers. Before them, ranks tell each other which gradients there are.
    """
    by_dtype: Counter[str] = Counter()
    for p in survey.parameters:
        if p.frozen_by is None and p.divided_shape is None:
            by_dtype[p.dtype] += shard_numel(p, layout.shard) * p.itemsize
    buckets = sum(math.ceil(num_bytes / SUM_BYTES) for num_bytes in by_dtype.values())
    return 2 * (1 + buckets), 2.0 * by_dtype.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrices:
    """An update in which one rank computes on each whole matrix, in bfloat16; zeros without one."""

    calls: int = 0
    sent_bytes: float = 0.0
    """Bytes that one rank sends, in the mean of all ranks."""
    flops: int = 0
    """Floating-point operations of the costliest rank of each round."""
    needed_bytes: int = 0
    """Bytes of the largest matrix: what came, two iterates and two products of its own; or the
    result, whole and as rows, and those of others that come back."""


def owned_matrices(layout: Layout, survey: Survey) -> OwnedMatrices:
    if not optimizer_of(layout.optim.name).tells_hidden:
        return OwnedMatrices()
    trained = [p for p in survey.parameters if p.frozen_by is None]
    shapes = [p.whole_shape for p in trained if is_in_a_layer(p.name, p.shape)]
    if not shapes:
        return OwnedMatrices()
    ranks, rounds = layout.owners, rounds_of(shapes, layout.owners)
    numel = sum(math.prod(shape) for shape in shapes)
    costs = [max(newton_schulz_flops(shapes[i]) for i, _ in pairs) for pairs in rounds]
    needed = [math.prod(s) * 3 + max(2 * min(s) ** 2, math.prod(s)) for s in shapes]
    return OwnedMatrices(
        calls=2 * len(rounds) if ranks > 1 else 0,
        sent_bytes=2 * HALF_BYTES * numel * (ranks - 1) / ranks**2,
        flops=sum(costs),
        needed_bytes=HALF_BYTES * max(needed),
    )


def _uses(groups: dict[str, Group], trace: Trace | None, steps: int) -> Iterator[tuple[str, int]]:
    """Yield each group and the number of its all-gathers in a step."""
    reached = reached_by_backward(trace)
    fetched = fetched_ahead(groups, trace)
    passes = 0 if trace is None else trace.passes_before
    for name, group in groups.items():
        if not group.gathered_bytes:
            yield name, 0
        elif group.stays:
            yield name, 1 + passes
        else:
            again = reached is None or bool(reached & set(group.blocks))
            ahead = 1 if name and name == fetched else 0  # the next forward uses it
            yield name, steps * ((2 if name and again else 1) + passes) + ahead
