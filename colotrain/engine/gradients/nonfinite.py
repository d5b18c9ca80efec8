"""Finds where a loss or gradient stopped being finite, by running the step again with checks.

The second pass repeats the first: the weights are still those of the step, its samples are a
function of its number, and the generator's state is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import Batch, StepTotals, accumulate
from colotrain.engine.gradients.gradients import GradientState, unsharded_parameters
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.events.kinds import Nonfinite
from colotrain.records import to_plain
from colotrain.spec.axes import PP

PHASES = ("forward", "backward", "reduce")


def describe(origin: Nonfinite) -> str:
    """Return text like `backward of micro-batch 3 on rank 1, module mlp, samples [75]`."""
    where = f"{origin.phase} of micro-batch {origin.micro_batch} on rank {origin.rank}"
    has_module = origin.phase != "reduce"
    names = [f"module {origin.module or '(the model itself)'}"] if has_module else []
    names += [f"parameter {origin.parameter}"] if origin.parameter else []
    samples = f"samples {(origin.samples or [])[:8]}"
    samples += f", whose {origin.input} is not finite itself" if origin.input else ""
    return ", ".join([where, *names, samples])


class NonfiniteHooks:
    """Records the first value that is not finite in this rank's forward and backward passes."""

    def __init__(self, state: GradientState) -> None:
        self.state, self.micro_batch = state, 0
        self.found: tuple[int, str, str | None, str | None] | None = None

    def note(self, phase: str, module: str | None, parameter: str | None = None) -> None:
        if self.found is None:
            self.found = (self.micro_batch, phase, module, parameter)

    def count(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.micro_batch += 1
            yield batch

    @contextmanager
    def on(self) -> Iterator[None]:
        """Add hooks to every module's output and every whole parameter's gradient."""
        model = self.state.sharded.module
        handles = [
            module.register_forward_hook(self._after_forward(name))
            for name, module in module_tree.named_modules(model)
        ]
        for name, whole in unsharded_parameters(self.state):
            handles.append(whole.register_hook(self._on_gradient(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_forward(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if any(not is_finite(tensor) for tensor in tensors_in(output)):
                self.note("forward", name)

        return hook

    def _on_gradient(self, name: str) -> Any:
        def hook(grad: Tensor) -> None:
            if not is_finite(grad):
                self.note("backward", name.rpartition(".")[0], name)

        return hook


def locate(
    state: GradientState,
    batches: Iterable[Batch],
    ids: list[list[int]],
    *,
    step: int,
    nominal: float,
) -> Nonfinite | None:
    """Run the step's micro-batches again and return where the first non-finite value appeared.

    All ranks must call, and all get the same result; None where the second pass was clean (a
    transient fault). `ids` are this rank's samples by micro-batch; `step` counts from 1.
    """
    watch = NonfiniteHooks(state)
    seen: list[dict[str, list[int]]] = []

    def noted() -> Iterator[Batch]:
        for batch in batches:
            seen.append(_bad_inputs(batch, num=len(ids[len(seen)])))
            yield batch

    with watch.on():
        totals = StepTotals(nominal=nominal)
        accumulate(state, watch.count(noted()), num=len(ids), totals=totals, one_by_one=True)
    mine = None
    if watch.found is not None:
        micro_batch, phase, module, parameter = watch.found
        bad, of_batch = seen[micro_batch - 1], ids[micro_batch - 1]
        rows = sorted({row for rows in bad.values() for row in rows})
        mine = Nonfinite(
            step=step,
            rank=dist.get_rank(),
            micro_batch=micro_batch,
            phase=phase,
            module=module,
            parameter=parameter,
            samples=[of_batch[row] for row in rows] or list(of_batch),
            input=next(iter(bad), None),
        )
    return _first_of_all_ranks(mine, state.sharded) or _after_reduction(state, ids, step)


def _first_of_all_ranks(mine: Nonfinite | None, sharded: ShardedModel) -> Nonfinite | None:
    """Return the first in time: backward begins with the model's last blocks."""
    everyone = exchange.all_gather(to_plain(mine))
    found = [Nonfinite(**origin) for origin in everyone if origin is not None]

    def place(origin: Nonfinite) -> tuple[int, int, int, int]:
        rank = origin.rank or 0
        stage = sharded.comms.ranks.coords(rank)[PP]
        at = sharded.stage.place_of(origin.module or "", stage)
        at = -at if origin.phase == "backward" else at
        return origin.micro_batch or 0, PHASES.index(origin.phase), at, rank

    return min(found, key=place, default=None)


def _after_reduction(state: GradientState, ids: list[list[int]], step: int) -> Nonfinite | None:
    """Return the origin for gradients that were finite on every rank and overflowed when summed."""
    bad = [
        name
        for name, parameter in module_tree.named_parameters(state.sharded.module)
        if parameter.grad is not None and not is_finite(local_part(parameter.grad))
    ]
    if not bad:
        return _first_of_all_ranks(None, state.sharded)
    own = Nonfinite(
        step=step,
        rank=dist.get_rank(),
        micro_batch=len(ids),
        phase="reduce",
        module=bad[0].rpartition(".")[0],
        parameter=bad[0],
        samples=[i for batch in ids for i in batch],
    )
    return _first_of_all_ranks(own, state.sharded)


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def tensors_in(value: Any, *, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors of a forward's output, which may be of any class, down to some `depth`."""
    inside: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = vars(value).values()
    for item in inside if depth else ():
        yield from tensors_in(item, depth=depth - 1)


def _bad_inputs(batch: Batch, *, num: int) -> dict[str, list[int]]:
    """Return tensor of the batch → its rows, of `num` samples, with values that are not finite.

    Entries of other lengths are what a pass before the step says of the global batch.
    """
    own = {n: t for n, t in batch.items() if t.is_floating_point() and t.shape[:1] == (num,)}
    floating = {n: t.reshape(num, -1) for n, t in own.items()}
    bad = {n: (~torch.isfinite(t).all(1)).nonzero().flatten().tolist() for n, t in floating.items()}
    return {name: rows for name, rows in bad.items() if rows}
