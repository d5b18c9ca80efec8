"""What users' code attaches to parameters, and what its forward does to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.gradients.gradients import watch
from colotrain.engine.sharding.sharded_model import ShardedModel, materialise_, shard_
from colotrain.engine.sharding.shared_parameters import share_parameters
from colotrain.errors import ColotrainError
from colotrain.spec.plan import RunPlan
from tests.dist.test_transport import plan_of, run


class Clamped(nn.Module):
    """A hook that is no linear function of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        for parameter in (self.linear.weight, self.scale):
            parameter.register_hook(lambda grad: grad.clamp(-0.02, 0.02))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x) * self.scale, labels)


def batch_of(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 6, generator=generator)
    return {"x": x, "labels": torch.randint(0, 5, (4,), generator=generator)}


def sharded_model(model: nn.Module, plan: RunPlan, *, shared: bool) -> ShardedModel:
    sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), [])
    shared_params = share_parameters(sharded) if shared else None
    allocate = shared_params.allocate if shared_params is not None else lambda fresh: None
    materialise_(sharded, device="cpu", seed=0, allocate=allocate)
    return sharded


def clamps_as_under_ddp(rank: int, *plans: RunPlan) -> None:
    replica = DistributedDataParallel(Clamped())
    replica(**batch_of(rank)).backward()
    for plan in plans:
        sharded = sharded_model(Clamped(), plan, shared=False)
        state = watch(sharded)
        accumulate(state, [batch_of(rank)], num=1, totals=StepTotals(nominal=8.0))
        for ours, theirs in zip(
            sharded.module.parameters(), replica.module.parameters(), strict=True
        ):
            assert ours.grad is not None
            assert theirs.grad is not None
            whole = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-5, atol=1e-7)


def test_a_hook_sees_what_it_sees_under_ddp() -> None:
    run(clamps_as_under_ddp, 2, *(plan_of(plugin, 2) for plugin in ("zero1", "zero3")))


class Changes(nn.Module):
    """A forward that changes its embedding in one of many ways."""

    def __init__(self, how: Callable[[Tensor], object] | None, *, training: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, max_norm=None if how else 0.1)
        self.how, self.only_in_training = how, training

    def forward(self, x: Tensor) -> Tensor:
        if self.how is not None and (self.training or not self.only_in_training):
            self.how(self.embed.weight)
        return self.embed(x).square().mean()


@torch.no_grad()
def clamps(weight: Tensor) -> None:
    weight.clamp_(-0.1, 0.1)


def clamps_data(weight: Tensor) -> None:
    weight.data[1:].clamp_(-0.1, 0.1)


def clamps_detached(weight: Tensor) -> None:
    weight.detach()[0].zero_()


def replaces_data(weight: Tensor) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


def only_reads(weight: Tensor) -> None:
    weight.data.norm(), weight.detach().norm()


def finds_changes(rank: int, *plans: RunPlan) -> None:
    for how in (None, clamps, clamps_data, clamps_detached, replaces_data, only_reads):
        for plan in plans:
            for shared in (False, True):
                finds_change(how, plan, shared=shared, training=how is not None)


def finds_change(
    how: Callable[[Tensor], object] | None, plan: RunPlan, *, shared: bool, training: bool
) -> None:
    module = sharded_model(Changes(how, training=training), plan, shared=shared).module
    x = torch.arange(8)
    if training:
        module.eval()
        module(x)
        module.train()
    if how is only_reads:
        module(x)
        return
    with pytest.raises(ColotrainError, match=r"changes embed\.weight in place"):
        module(x)


def test_a_forward_that_changes_a_parameter_in_place_is_an_error_that_names_it() -> None:
    plans = (plan_of("zero1", 2), plan_of("zero3", 2), plan_of("zero2", 2, "train.precision=bf16"))
    run(finds_changes, 2, *plans)


class Penalty(nn.Module):
    """A penalty on the gradients of its features, taken in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y).tanh()
        if not self.is_on:
            return y.square().sum()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().sum() + slope.square().mean()


def refuses_backward_in_forward(rank: int, plan: RunPlan) -> None:
    for shared in (False, True):
        torch.manual_seed(0)
        model, plain = Penalty(), Penalty()
        groups = [(f"blocks.{i}", [block]) for i, block in enumerate(model.blocks)]
        sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), groups)  # type: ignore[arg-type]
        shared_params = share_parameters(sharded) if shared else None
        allocate = shared_params.allocate if shared_params is not None else lambda fresh: None
        materialise_(sharded, device="cpu", seed=0, allocate=allocate)
        with pytest.raises(ColotrainError, match=r"forward calls backward or autograd\.grad"):
            sharded.module(torch.ones(2, 6))
        # whoever tries a model may go on after it, and then it has to train
        model.is_on = plain.is_on = False
        whole = {name: shards.full_tensor() for name, shards in model.named_parameters()}
        plain.load_state_dict(whole)
        sharded.module(torch.ones(2, 6)).backward()
        plain(torch.ones(2, 6)).backward()
        for name, parameter in plain.named_parameters():
            found = model.get_parameter(name).grad
            torch.testing.assert_close(found.full_tensor(), 2 * parameter.grad)  # sum of two ranks


def test_backward_inside_forward_is_refused_and_no_crash() -> None:
    run(refuses_backward_in_forward, 2, plan_of("zero3", 2))
