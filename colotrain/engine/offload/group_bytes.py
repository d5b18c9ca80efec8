"""What groups weigh, and what else a rank will need: where placement begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from colotrain.engine.freezing import matches
from colotrain.engine.probes import memory_now
from colotrain.spec.offload import SAFETY, GroupBytes, Other
from colotrain.spec.plan import RunPlan

Modules = list[tuple[str, list[nn.Module]]]


def weigh(model: nn.Module, groups: Modules, plan: RunPlan, state_ratio: float) -> list[GroupBytes]:
    """What each group weighs on a rank, the root's last, when all that ever trains does so.

    `state_ratio` is bytes of optimizer state per byte of parameter. The same on every rank: shards
    are counted with the padding that makes them equal.
    """
    ranks = plan.plugin.mesh[-1]
    thawed = [glob for globs in plan.freeze.unfreeze.values() for glob in globs]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim and parameter.numel():
            names.setdefault(parameter, []).append(name)
    sizes = []
    for name, modules in [*groups, ("", [model])]:
        whole = trained = 0
        for parameter in (p for module in modules for p in module.parameters()):
            known_as = names.pop(parameter, None)
            if known_as is None:  # counted with a group inside this one
                continue
            rows = -(-parameter.shape[0] // ranks)
            size = rows * (parameter.numel() // parameter.shape[0]) * parameter.itemsize
            whole += size
            trained += size if parameter.requires_grad or matches(known_as, thawed) else 0
        state = round(trained * state_ratio)
        sizes.append(GroupBytes(name=name, parameters=whole, gradients=trained, optimizer=state))
    return sizes


def guess(plan: RunPlan, sizes: Sequence[GroupBytes]) -> Other:
    """What else a rank will need, before any step has shown it. All ranks must call.

    Gathered parameters: the root's with the output of its gather, and two groups'; of one group
    the whole gradient, the part of it being added, and the input of its reduction; activations as
    the ledger has them.
    """
    now = memory_now()[0] if plan.cluster.device == "cpu" else 0
    base = torch.tensor(now, dtype=torch.int64, device=plan.cluster.device)
    dist.all_reduce(base, op=dist.ReduceOp.MAX)
    ranks = plan.plugin.mesh[-1]
    blocks = sorted(size.parameters for size in sizes[:-1])
    gathered = ranks * (2 * sizes[-1].parameters + sum(blocks[-2:]))
    reduced = 3 * ranks * max(size.gradients for size in sizes)
    passing = SAFETY * (gathered + reduced) + plan.memory.activations
    compute = int(base) + int(passing)
    return Other(compute=compute, update=int(base))
