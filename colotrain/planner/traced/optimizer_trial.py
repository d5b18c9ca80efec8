"""Whether an optimizer of the user's updates each parameter from that parameter alone.

With pipeline stages it sees the parameters of one stage. It is tried on small parameters in
float64, all of them together and divided as among stages: a norm over all parameters, an estimate
that they share, or random numbers that are drawn for one after another give other values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colotrain.dotted import described
from colotrain.engine.optim.base import Unsharded
from colotrain.engine.optim.optimizers import make
from colotrain.spec.plan import OptimPlan

SHAPES = ((6, 4), (4,), (3, 5), (5,), (4, 4))
STAGES = ((0, 1), (2, 3, 4))
"""Positions of the parameters that are tried together."""
MATRICES = ((0,), (2, 4))
SCALES = (1.0, 1e-4, 1e3, 1.0) * 5
"""Size of the gradients of each step: limits on norms hold for some, and not for others."""
CLOSE = 1e-12
"""Share of a value by which sums in another order may differ in float64."""


def why_not_on_stages(plan: OptimPlan, *, with_none: bool) -> str | None:
    """Return why the optimizer `plan.name` would not be the same on stages; None where it would.

    `with_none`: whether a stage may have no trained parameters. An optimizer that takes matrices
    alone is tried on these: with adapters, no other parameters train.
    """
    with torch.random.fork_rng(devices=[]):
        stages: tuple[tuple[int, ...], ...] = STAGES
        try:
            try:
                _train(plan, stages[0])
            except Exception:  # whatever the user's class raises
                stages = MATRICES
            together, changed = _train(plan, sorted(sum(stages, ())))
            apart = [value for chosen in stages for value in _train(plan, chosen)[0]]
            if with_none:
                _train(plan, ())
        except Exception as error:
            return f"tried on small parameters as those of stages, it raised {described(error)}"
    if changed:
        return f"it changes {changed!r} of its parameter groups, which differ between stages"
    furthest = max(float((a - b).abs().max()) for a, b in zip(together, apart, strict=True))
    if all(torch.allclose(a, b, rtol=CLOSE, atol=0) for a, b in zip(together, apart, strict=True)):
        return None
    return (
        "tried on small parameters, together and divided as among stages, it gave values that "
        f"differ by {furthest:.1g}: the update of one depends on others, or is random"
    )


def _train(plan: OptimPlan, chosen: Sequence[int]) -> tuple[list[Tensor], str]:
    """Return parameters after some steps, and a setting of their groups that these changed."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    torch.manual_seed(0)
    params = {index: nn.Parameter(values[index].clone()) for index in chosen}
    matrices = [p for p in params.values() if p.ndim > 1]
    vectors = [p for p in params.values() if p.ndim < 2]
    groups = [
        {"params": each, "weight_decay": decay, "lr": plan.lr}
        for each, decay in ((matrices, plan.weight_decay), (vectors, 0.0))
    ]
    optimizer = make(plan, groups if params else groups[1:], Unsharded())
    before = [{k: repr(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for scale in SCALES:
        gradients = [torch.randn(v.shape, generator=draw, dtype=v.dtype) for v in values]
        for index, parameter in params.items():
            parameter.grad = scale * gradients[index]
        optimizer.step()
    changed = (
        key
        for group, first in zip(optimizer.param_groups, before, strict=True)
        for key, value in group.items()
        if key not in ("params", "lr") and repr(value) != first.get(key)
    )
    return [p.detach() for p in params.values()], next(changed, "")
