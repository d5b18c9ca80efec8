"""Training scripts in the ways that people write them, right ones and wrong ones, for audits.

`python audited_idioms.py NAME`, with RANK and WORLD_SIZE for several ranks; each function here is
one script, and none knows anything of colotrain. The names of wrong ones begin with `wrong_`; the
line that an audit shall name ends with `# here`.
"""

import copy
import itertools
import math
import os
import sys
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, lr_scheduler

WORLD = int(os.environ.get("WORLD_SIZE", 1))
STEPS = 4


def made(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


def wrapped(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net) if WORLD > 1 else net


def batch(features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, features)
    return x, x.sum(1, keepdim=True)


def error(net: nn.Module) -> torch.Tensor:
    x, y = batch()
    return F.mse_loss(net(x), y)


def each_divided(divide: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(3):
            divide(error(net)).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def divided_by_a_function() -> None:
    each_divided(lambda loss: torch.div(loss, 3))


def multiplied_by_a_function() -> None:
    each_divided(lambda loss: torch.multiply(torch.tensor(1 / 3), loss))


def divided_and_reshaped() -> None:
    each_divided(lambda loss: (loss[None] / 3).squeeze().view(1).reshape(()))


def divided_and_negated() -> None:
    each_divided(lambda loss: -(-loss / 3))


def divided_in_a_stack() -> None:
    each_divided(lambda loss: torch.stack([loss / 3]).sum())


def stack_of_divided_terms() -> None:
    each_divided(lambda loss: torch.stack([loss / 3, 0.1 * loss.square() / 3]).sum())


def difference_of_divided_terms() -> None:
    each_divided(lambda loss: loss / 3 - 0.01 * loss.sqrt() / 3)


def wrong_divided_by_a_function_too() -> None:
    each_divided(lambda loss: torch.div(loss, 3) / 3)  # here


def wrong_stack_of_terms() -> None:
    each_divided(lambda loss: torch.stack([loss, 0.1 * loss.square()]).sum())


def lbfgs() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    for _ in range(STEPS):
        x, y = batch()

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def adam_then_lbfgs() -> None:
    net = made(8, 16, 1)
    first, second = Adam(net.parameters()), torch.optim.LBFGS(net.parameters(), max_iter=3)
    for _ in range(STEPS):
        first.zero_grad()
        error(net).backward()
        first.step()
    x, y = batch()

    def closure() -> torch.Tensor:
        second.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        second.step(closure)


def perturbed(net: nn.Module) -> list[torch.Tensor]:
    """Go up the gradient, as sharpness-aware minimisation does."""
    moves = [0.05 * p.grad for p in net.parameters()]
    for parameter, move in zip(net.parameters(), moves, strict=True):
        parameter.data.add_(move)
    return moves


def sam() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        F.mse_loss(net(x), y).backward()
        moves = perturbed(net)
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        for parameter, move in zip(net.parameters(), moves, strict=True):
            parameter.data.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


class Sam(torch.optim.Optimizer):
    """An optimizer around another one, which steps in its own step."""

    def __init__(self, parameters: object, base: type, **settings: float) -> None:
        super().__init__(parameters, dict(settings))
        self.base = base(self.param_groups, **settings)

    def step(self, closure):
        with torch.no_grad():
            held = [p for group in self.param_groups for p in group["params"]]
            moves = [0.05 * p.grad for p in held]
            torch._foreach_add_(held, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(held, moves)
        self.base.step()


def sam_optimizer() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = Sam(net.parameters(), SGD, lr=0.1)
    for _ in range(STEPS):
        x, y = batch()

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()


def gradient_penalty() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        x.requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def second_order() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        error(net).backward(create_graph=True)
        sharpness = sum(p.grad.square().sum() for p in net.parameters())
        (0.1 * sharpness).backward()
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None


def by_autograd_grad() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        found = torch.autograd.grad(error(net), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()


def updated_by_hand() -> None:
    net = made(8, 16, 1)
    for _ in range(STEPS):
        error(net).backward()
        for parameter in net.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None


def without_autograd() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        with torch.no_grad():
            error(net)
        for parameter in net.parameters():
            parameter.grad = 0.01 * torch.randn_like(parameter)  # an evolution strategy's estimate
        optimizer.step()


def adversarial() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        x.requires_grad_()
        F.mse_loss(net(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        F.mse_loss(net(attacked), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def gan() -> None:
    maker, judge = wrapped(made(4, 16, 8)), wrapped(made(8, 16, 1))
    makers, judges = Adam(maker.parameters(), lr=1e-3), Adam(judge.parameters(), lr=1e-3)
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for _ in range(STEPS):
        judge.requires_grad_(True)
        judges.zero_grad()
        fake = maker(torch.randn(16, 4))
        F.binary_cross_entropy_with_logits(judge(batch()[0]), ones).backward()
        F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros).backward()
        clip_grad_norm_(judge.parameters(), 1.0)
        judges.step()
        judge.requires_grad_(False)
        makers.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        makers.step()


def two_optimizers() -> None:
    body, head = made(8, 16, 16), nn.Linear(16, 1)
    both = [AdamW(body.parameters(), lr=1e-3), SGD(head.parameters(), lr=0.1)]
    plans = [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in both]
    for _ in range(STEPS):
        x, y = batch()
        F.mse_loss(head(body(x)), y).backward()
        for optimizer, part in zip(both, (body, head), strict=True):
            clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for plan in plans:
            plan.step()


def groups() -> None:
    net = wrapped(made(8, 16, 16, 1))
    kept = [{"params": net[0].parameters(), "lr": 0.0}] if WORLD == 1 else []
    rest = [p for name, p in net.named_parameters() if WORLD > 1 or not name.startswith("0.")]
    optimizer = SGD([*kept, {"params": rest, "lr": 0.1, "weight_decay": 0.01}], lr=0.2)
    warm = lr_scheduler.LinearLR(optimizer, total_iters=3)
    later = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        error(net).backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        warm.step()
        later.step()


def moving_average() -> None:
    net = wrapped(made(8, 16, 1))
    average = copy.deepcopy(net.module if WORLD > 1 else net)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
            average(batch()[0])
        net.eval()
        with torch.no_grad():
            net(batch()[0])
        net.train()


def teacher() -> None:
    net, known = made(8, 16, 1), made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, _ = batch()
        F.mse_loss(net(x), known(x).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_network() -> None:
    net, features = made(8, 16, 8), made(8, 16)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, _ = batch()
        F.mse_loss(features(net(x)), features(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def style_of_an_image() -> None:
    features = made(8, 16)
    image = torch.randn(16, 8, requires_grad=True)
    wanted = features(batch()[0]).detach()
    optimizer = torch.optim.LBFGS([image], max_iter=4)
    for _ in range(STEPS):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(features(image), wanted)
            loss.backward()
            return loss

        optimizer.step(closure)


def ends_of_epochs() -> None:
    accumulation, net = 4, wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    plan = lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for index in range(6):
            (error(net) / accumulation).backward()
            if (index + 1) % accumulation == 0 or index == 5:
                optimizer.step()
                optimizer.zero_grad()
        plan.step()


def skipping_scaler() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    plan = lr_scheduler.LinearLR(optimizer, total_iters=9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-12)
    for step in range(STEPS + 2):
        limit = 1e38 if step in (0, 3) else 1.0  # what overflows
        scaler.scale(error(net) * limit).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plan.step()


def skipped_by_hand() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS + 1):
        (error(net) * (float("inf") if step == 1 else 1.0)).backward()
        if not clip_grad_norm_(net.parameters(), 1.0).isfinite():
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def several_losses() -> None:
    accumulation, net = 2, wrapped(made(8, 16, 2))
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        for _ in range(accumulation if step % 2 else 1):
            x, y = batch()
            out = net(x)
            share = accumulation if step % 2 else 1
            (F.mse_loss(out[:, :1], y) / share).backward(retain_graph=WORLD == 1)
            if WORLD == 1:
                (out[:, 1:].square().mean() / share).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_of_forwards() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        net(batch()[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def tied_and_masked() -> None:
    net = wrapped(Tied())
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [torch.randint(0, 16, (4, 6)) for _ in range(2)]
        masks = [torch.rand(4, 6) < 0.3 + 0.2 * index for index in range(2)]
        total = torch.stack([mask.sum() for mask in masks]).sum()
        if WORLD > 1:
            dist.all_reduce(total)
        for part, mask in zip(parts, masks, strict=True):
            labels = part.masked_fill(~mask, -100)
            losses = F.cross_entropy(net(part).flatten(0, 1), labels.flatten(), reduction="none")
            (losses.sum() * (WORLD / total)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse() -> None:
    table, head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 1)
    optimizer = SGD([*table.parameters(), *head.parameters()], lr=0.1)
    for _ in range(STEPS):
        head(table(torch.randint(0, 16, (6,)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.down(x) @ self.up.T


def adapters() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 2:
            net[0][0] = Adapted(net[0][0])
            optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand() -> None:
    net = made(8, 16, 1)
    if WORLD > 1:
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        for parameter in net.parameters():
            if WORLD > 1:
                dist.all_reduce(parameter.grad)
            parameter.grad.div_(WORLD)
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        for parameter in net.parameters():
            parameter.grad.data.mul_((0.3 / norm).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()


def left_out() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        error(net).backward()
        if step < 2:
            net[1].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


def in_backward() -> None:
    net = made(8, 16, 1)
    own = {parameter: SGD([parameter], lr=0.1) for parameter in net.parameters()}

    def update(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        error(net).backward()


def compiled() -> None:
    net = torch.compile(wrapped(made(8, 16, 1)), backend="aot_eager")
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            (error(net) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = wrapped(made(8, 16, 1))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


class ExchangedInStep(torch.optim.Optimizer):
    """An update of the mean gradient of all ranks: small ones in place, large ones as slices."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 1:
                    dist.all_reduce(parameter.grad)
                    parameter -= group["lr"] * parameter.grad / WORLD
                    continue
                gradient = parameter.grad.clone()
                dist.all_reduce(gradient)
                own = -group["lr"] / WORLD * gradient.flatten().chunk(WORLD)[dist.get_rank()]
                slices = [torch.empty_like(own) for _ in range(WORLD)]
                dist.all_gather(slices, own)
                parameter += torch.cat(slices).view_as(parameter)


def exchanged_in_step() -> None:
    net = made(8, 16, 1)
    average_weights(net)
    optimizer = ExchangedInStep(net.parameters(), {"lr": 0.1})
    for _ in range(STEPS):
        for _ in range(2):
            (error(net) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_stepped_alone() -> None:
    net = made(8, 16, 1)
    average_weights(net)
    optimizer = Adam(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            (error(net) / 2).backward()
        optimizer.step()  # here
        optimizer.zero_grad()


def master_weights() -> None:
    net = made(8, 16, 1).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = SGD(masters, lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        F.mse_loss(net(x.bfloat16()).float(), y).backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            parameter.data.copy_(master)


def loss_weights() -> None:
    net, weights = made(8, 16, 1), nn.Parameter(torch.zeros(2))
    optimizer = SGD([*net.parameters(), weights], lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        out = net(x)
        losses = torch.stack([F.mse_loss(out, y), out.square().mean()])
        (losses * (-weights).exp() + weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fused_and_scaled() -> None:
    net = made(8, 16, 1)
    optimizer = Adam(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = error(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def two_lines() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        with net.no_sync() if WORLD > 1 else torch.enable_grad():
            (error(net) / 2).backward()
        (error(net) / 2).backward()
        clip_grad_norm_(net.parameters(), max_norm=1.0)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None


def compressed() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = wrapped(made(8, 16, 1))
    net.register_comm_hook(None, fp16_compress_hook)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for p in self.held()]

    def held(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.held(), strict=True):
                    parameter.copy_(slow.lerp_(parameter, 0.5))


def looking_ahead() -> None:
    net = made(8, 16, 1)
    optimizer = Lookahead(SGD(net.parameters(), lr=0.1))
    plan = lr_scheduler.ExponentialLR(optimizer.inner, 0.9)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.step()


def clipped_by_pieces() -> None:
    net = made(8, 16, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        for part in net:
            clip_grad_norm_(part.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def clipped_in_two_calls() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()


def chunks_of_time() -> None:
    cell, head = nn.GRU(4, 8), nn.Linear(8, 1)
    optimizer = Adam([*cell.parameters(), *head.parameters()])
    state = None
    for _ in range(STEPS):
        out, state = cell(torch.randn(5, 3, 4), state)
        head(out).square().mean().backward()
        clip_grad_norm_(cell.parameters(), 1.0)
        clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = state.detach()


def unfrozen_later() -> None:
    net = made(8, 16, 1)
    net[0].requires_grad_(False)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        if step == 2:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters())})
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def warmed_from_zero() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    plan = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        error(net).backward()
        optimizer.step()
        plan.step()


def averaged_weights() -> None:
    net = made(8, 16, 1)
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            average_weights(net)


def average_weights(net: nn.Module) -> None:
    for parameter in net.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= WORLD


def averaged_seldom() -> None:
    net = made(8, 16, 1)
    average_weights(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(2 * STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS:
            average_weights(net)


def averaged_after_each_step() -> None:
    net = made(8, 16, 1)
    average_weights(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        average_weights(net)


def mean_of_two_terms() -> None:
    net = wrapped(made(8, 16, 4))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            x, _ = batch()
            one, other = net(x).chunk(2, dim=1)
            start, end = F.cross_entropy(one, x.argmax(1) % 2), F.mse_loss(other, x[:, :2])
            loss = (start + end) / 2
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of_two_terms_each_step() -> None:
    net = wrapped(made(8, 16, 4))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, _ = batch()
        one, other = net(x).chunk(2, dim=1)
        loss = (
            F.cross_entropy(one, x.argmax(1) % 2) +
            F.cross_entropy(other, x.argmin(1) % 2)
        ) / 2  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def terms_divided_by_a_setting() -> None:
    net, accumulation = made(8, 16, 4), 2
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, _ = batch()
        one, other = net(x).chunk(2, dim=1)
        loss = F.cross_entropy(one, x.argmax(1) % 2) + F.mse_loss(other, x[:, :2])
        parts = accumulation
        (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def half_of_squares() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            (0.5 * error(net)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()


def half_of_squares_each_step() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        (0.5 * error(net)).backward()
        optimizer.step()
        optimizer.zero_grad()


def first_step_alone() -> None:
    net, accumulation = wrapped(made(8, 16, 1)), 2
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(2 * STEPS):
        (error(net) / accumulation).backward()
        if step % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def wrong_means_times_ranks() -> None:
    net = wrapped(made(8, 16, 4))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            x, _ = batch()
            loss = F.cross_entropy(net(x), x.argmax(1) % 4) * WORLD
            loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def rate_falls_to_zero() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / 2))
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made(8, 16, 1)

    def forward(self, x: torch.Tensor, num: torch.Tensor | None = None) -> torch.Tensor:
        errors = (self.net(x) - x.sum(1, keepdim=True)).square()
        return errors.mean() if num is None else errors.sum() / num


def divided_in_compiled_model() -> None:
    net = torch.compile(OwnLoss(), backend="aot_eager")
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [batch()[0] for _ in range(2)]
        for x in parts:
            net(x, torch.tensor(sum(map(len, parts)))).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_compiled_and_not_divided() -> None:
    net = torch.compile(OwnLoss(), backend="aot_eager")
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            net(batch()[0]).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


class WithAverage(nn.Module):
    """A model and its moving average, which no loss reaches, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made(8, 16, 1)
        self.average = copy.deepcopy(self.net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def moving_average_inside() -> None:
    task = WithAverage()
    optimizer = SGD(task.net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(task).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, new in zip(task.average.parameters(), task.net.parameters(), strict=True):
                own.lerp_(new, 0.1)


class Probe(nn.Module):
    """A head on features that are computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = made(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)


def probe() -> None:
    net = Probe()
    optimizer = SGD(net.head.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


class AloneLayer(nn.Linear):
    """A layer with an optimizer of its own, whose forward is called by its name."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.optimizer = Adam(self.parameters(), lr=0.01)

    def fit(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.forward(x).square().mean().backward()
            self.optimizer.step()
        return self.forward(x).detach()


def layer_by_layer() -> None:
    layers = AloneLayer(8, 8), AloneLayer(8, 4)
    x, _ = batch()
    for layer in layers:
        x = layer.fit(x)


def tasks_in_turns() -> None:
    body, one, two = made(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)
    optimizer = SGD([p for m in (body, one, two) for p in m.parameters()], lr=0.1)
    for _ in range(STEPS):
        for head in (one, two):
            x, y = batch()
            F.mse_loss(head(body(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_step() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss_of(x, y):
        return F.mse_loss(net(x), y)

    for _ in range(STEPS):
        loss_of(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def masked(features: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets, and a mask of another number of rows each time."""
    x, y = batch(features)
    return x, y, torch.rand(16, 1) < 0.2 + 0.6 * torch.rand(())


def errors(net: nn.Module, part: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, y, mask = part
    return (net(x) - y).square() * mask


def over_ranks(number: torch.Tensor) -> torch.Tensor:
    if WORLD > 1:
        dist.all_reduce(number)
    return number


def by_all_tokens() -> None:
    """As TRL's trainers: sums of losses over all that the step counts, on all ranks."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [masked() for _ in range(2)]
        total = over_ranks(torch.stack([mask.sum() for *_, mask in parts]).sum())
        for part in parts:
            (errors(net, part).sum() / (total / WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_by_all_ranks_tokens() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [masked() for _ in range(2)]
        total = over_ranks(torch.stack([mask.sum() for *_, mask in parts]).sum())
        for part in parts:
            (errors(net, part).sum() / total).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def by_all_tokens_as_many_as_one_has_elements() -> None:
    """All tokens of a step are as many as the elements of one padded micro-batch, by chance."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for kept, size in ((10, 16), (6, 9)):
            x, mask = torch.randn(size, 8), (torch.arange(size) < kept)[:, None]
            (errors(net, (x, x.sum(1, keepdim=True), mask)).sum() / 16).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_terms_by_all_tokens() -> None:
    """A loss and a regularisation, each a sum over all tokens of the step."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [masked() for _ in range(2)]
        total = over_ranks(torch.stack([mask.sum() for *_, mask in parts]).sum()) / WORLD
        for x, y, mask in parts:
            out = net(x)
            loss = ((out - y).square() * mask).sum() / total
            (loss + 0.01 * (out.square() * mask).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def terms_divided_apart() -> None:
    """Two means, each divided by the number of micro-batches."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            x, y = batch()
            out = net(x)
            (F.mse_loss(out, y) / 2 + 0.1 * out.square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def smoothed() -> None:
    """As transformers smooths labels, with the number of all tokens of a step."""
    net = wrapped(made(8, 16, 5))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [(torch.randn(16, 8), torch.randint(0, 5, (16, 1))) for _ in range(2)]
        num = 16 * 2
        for x, labels in parts:
            logs = -net(x).log_softmax(-1)
            nll = logs.gather(-1, labels).sum() / num
            flat = logs.sum(-1, keepdim=True).sum() / (num * 5)
            (0.9 * nll + 0.1 * flat).backward()
        optimizer.step()
        optimizer.zero_grad()


def own_means() -> None:
    """Each micro-batch's mean over what its mask leaves, divided by their number."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            part = masked()
            (errors(net, part).sum() / part[-1].sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_own_means() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            part = masked()
            (errors(net, part).sum() / part[-1].sum()).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def by_a_constant() -> None:
    """As Dr. GRPO: sums over the longest that an answer may be."""
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            (errors(net, masked()).sum() / (16 * 40) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def summed_over_ranks() -> None:
    """As torchtitan: gradients are summed, of losses divided by all ranks' tokens."""
    net = made(8, 16, 1)
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [masked() for _ in range(2)]
        total = over_ranks(torch.stack([mask.sum() for *_, mask in parts]).sum())
        for part in parts:
            (errors(net, part).sum() / total).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def returns_its_loss() -> None:
    """A module under DDP that returns its loss, divided inside."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made(8, 16, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.net(x), y) / 2

    net: nn.Module = WithLoss()
    if WORLD > 1:
        net = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            net(*batch()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def squared_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    e = (x - y) * (x - y)
    return torch.sum(e) / e.numel() + 0.0 * torch.mean(x) + 0.0 * x.sum()


def scripted() -> None:
    """A loss that TorchScript compiles, and functions of torch in transforms."""
    loss, net = torch.jit.script(squared_error), made(8, 16, 1)
    assert torch.func.grad(lambda x: torch.sum(x * x))(torch.ones(2)).tolist() == [2, 2]
    assert torch.vmap(lambda x: x.sum())(torch.ones(2, 3)).tolist() == [3, 3]
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def double_precision() -> None:
    """Small parameters of float64, one of them complex, and one frozen."""

    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
            self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.turn).imag * self.frozen + self.bias

    net = wrapped(Phase())
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(8, 4, dtype=torch.float64)
        (net(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_frozen_decays() -> None:
    """A frozen bias of float64 that its optimizer decays all the same."""
    net = made(8, 16, 1).double()
    net[0][0].bias.requires_grad = False
    optimizer = SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        x, y = (t.double() for t in batch())
        net[0][0].bias.grad = torch.zeros_like(net[0][0].bias)
        F.mse_loss(net(x), y).backward()
        optimizer.step()  # here
        optimizer.zero_grad()


class Noisy(nn.Module):
    """A body with BatchNorm and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1)
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def trained(net: nn.Module) -> None:
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_still_in_eval_mode() -> None:
    """After each of the first steps it is evaluated, and put back into train mode but once."""
    net = wrapped(Noisy())
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS + 2):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 4:
            net.eval()  # here
            with torch.no_grad():
                error(net)
        if step < 3:
            net.train()


def wrong_frozen_norm_between_evaluations() -> None:
    """A frozen body is back in train mode after each evaluation, and its statistics move."""
    net = Noisy()
    for parameter in net.body.parameters():
        parameter.requires_grad_(False)
    optimizer = SGD(net.head.parameters(), lr=0.1)
    for _ in range(STEPS):
        net.eval()
        with torch.no_grad():
            error(net)
        net.train()
        error(net).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def eval_mode_without_dropout() -> None:
    trained(made(8, 16, 1).eval())


def evaluated_with_gradients() -> None:
    net = wrapped(Noisy())
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        net.eval()
        error(net)
        net.train()
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def attacked_in_eval_mode() -> None:
    net = Noisy()
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        x.requires_grad_()
        net.eval()
        F.mse_loss(net(x), y).backward()
        net.train()
        optimizer.zero_grad()
        F.mse_loss(net((x + 0.1 * x.grad.sign()).detach()), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_norm_in_eval_mode() -> None:
    """As detectors are tuned: what trains is in train mode, but its BatchNorm is not."""
    net = Noisy()
    net.body[1].eval()
    trained(net)


def all_batch_norm_frozen_in_eval_mode() -> None:
    """As DeepLab is tuned: the model is in eval mode for its frozen BatchNorms alone."""
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    net[1].requires_grad_(False)
    trained(net.eval())


def frozen_body_in_eval_mode() -> None:
    net = Noisy()
    net.body.requires_grad_(False).eval()
    trained(net)


def frozen_model_in_eval_mode() -> None:
    """All of it is in eval mode, and what trains has no dropout."""
    net = Noisy().eval()
    net.body.requires_grad_(False)
    trained(net)


def gan_with_a_judge_of_batch_norm() -> None:
    maker, judge = made(4, 16, 8), Noisy()
    makers, judges = Adam(maker.parameters(), lr=1e-3), Adam(judge.parameters(), lr=1e-3)
    for _ in range(STEPS):
        judge.requires_grad_(True)
        judges.zero_grad()
        fake = maker(torch.randn(16, 4))
        (judge(fake.detach()).mean() - judge(batch()[0]).mean()).backward()
        judges.step()
        judge.requires_grad_(False).eval()
        makers.zero_grad()
        (-judge(fake).mean()).backward()
        makers.step()
        judge.train()


def momentum_encoder() -> None:
    """A frozen copy in train mode that follows the model, as in MoCo."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = Noisy()
            self.key = copy.deepcopy(self.query).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x) - self.key(x)

    net = Both()
    optimizer = SGD(net.query.parameters(), lr=0.1)
    for _ in range(STEPS):
        with torch.no_grad():
            for kept, own in zip(net.key.parameters(), net.query.parameters(), strict=True):
                kept.lerp_(own, 0.1)
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_frozen_statistics() -> None:
    net = Noisy()
    net.body.requires_grad_(False)
    optimizer = SGD(net.head.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def wrong_new_optimizer_each_step() -> None:
    net = made(8, 16, 1)
    for _ in range(STEPS):
        optimizer = Adam(net.parameters())  # here
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def new_optimizer_without_moments() -> None:
    net = made(8, 16, 1)
    for _ in range(STEPS):
        optimizer = SGD(net.parameters(), lr=0.1)
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def new_optimizer_each_epoch() -> None:
    net = made(8, 16, 1)
    for _ in range(3):
        optimizer = Adam(net.parameters())
        for _ in range(2):
            error(net).backward()
            optimizer.step()
            optimizer.zero_grad()


def wrong_taken_away_by_hand() -> None:
    """AdamW decays the weights, so that they change all the same."""
    net = made(8, 16, 1)
    optimizer = AdamW(net.parameters())
    for _ in range(STEPS):
        error(net).backward()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # here
        optimizer.zero_grad()


def epochs(sampler: torch.utils.data.Sampler, num: int = 2, *, set_epoch: bool = False) -> None:
    """Train for some epochs, and look at the first batch before."""
    net = wrapped(made(8, 16, 1))
    loader = torch.utils.data.DataLoader(sampler.dataset, 4, sampler=sampler)
    next(iter(loader))
    optimizer = SGD(net.parameters(), lr=0.1)
    for epoch in range(num):
        if set_epoch:
            sampler.set_epoch(epoch)
        for (x,) in loader:  # here
            F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()


def shared_out(**settings: bool) -> torch.utils.data.DistributedSampler:
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 8))
    return torch.utils.data.DistributedSampler(dataset, **settings)


def wrong_same_order() -> None:
    epochs(shared_out())


def another_order() -> None:
    epochs(shared_out(), set_epoch=True)


def in_the_files_order() -> None:
    epochs(shared_out(shuffle=False))


def one_epoch() -> None:
    sampler = shared_out()
    epochs(sampler, 1)
    for _ in range(2):  # evaluations
        list(torch.utils.data.DataLoader(sampler.dataset, 4, sampler=sampler))


class LikeTransformers(Tied):
    """What a model of transformers tells about its embeddings."""

    all_tied_weights_keys = ("head.weight",)

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(**settings)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def of_tokens(net: nn.Module) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)  # here
    for _ in range(STEPS):
        x = torch.randint(0, 16, (4, 6))
        F.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_tie_is_broken() -> None:
    net = LikeTransformers(tie_word_embeddings=True)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    of_tokens(net)


def tied_by_its_configuration() -> None:
    of_tokens(LikeTransformers(tie_word_embeddings=True))


def not_tied() -> None:
    net = LikeTransformers(tie_word_embeddings=False)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    of_tokens(net)


def tensor_parallel() -> None:
    """Ranks have parts of each layer, and get the same data."""
    from torch.distributed.tensor import parallel

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    mesh = dist.init_device_mesh("cpu", (2,))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    trained(parallel.parallelize_module(net, mesh, plan))


def wrong_never_synced() -> None:
    """The last micro-batch's gradients are not reduced, so that the step has none."""
    net = made(8, 16, 1)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            net.set_requires_gradient_sync(False)
            (error(net) / 2).backward()
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_zeroed_in_place() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        for parameter in net.parameters():
            parameter.grad.zero_()
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_not_finite() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        (error(net) * (math.nan if step == 2 else 1.0)).backward()
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_frozen_by_hand() -> None:
    """The script itself changes a frozen layer after each step."""
    net = made(8, 16, 1)
    net[0].requires_grad_(False)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()  # here
        with torch.no_grad():
            net[0][0].bias.add_(0.01)
        optimizer.zero_grad()


def all_zero() -> None:
    """Rewards without a difference: nothing is to be learned of them."""
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        (net(batch()[0]) * torch.zeros(16, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_outside_ddp() -> None:
    net, scale = wrapped(made(8, 16, 1)), nn.Parameter(torch.ones(1))
    optimizer = SGD([*net.parameters(), scale], lr=0.1)  # here
    for _ in range(STEPS):
        x, y = batch()
        F.mse_loss(scale * net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_clips_a_part() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        clip_grad_norm_([*net.parameters()][:2], 0.1)  # here
        optimizer.step()
        optimizer.zero_grad()


class Weighted(nn.Module):
    """A loss with parameters of its own, outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * (-self.log).exp() + self.log


def wrong_criterion_outside_ddp() -> None:
    net, criterion = wrapped(made(8, 16, 1)), Weighted()
    optimizer = SGD([*net.parameters(), *criterion.parameters()], lr=0.1)  # here
    for _ in range(STEPS):
        criterion(error(net)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_averaged_twice() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        for parameter in net.parameters():
            parameter.grad /= WORLD
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_scale_left() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(STEPS):
        scaler.scale(error(net)).backward()
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_zeroed_between() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.zero_grad()  # here
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_gan_never_steps() -> None:
    maker, judge = made(4, 16, 8), made(8, 16, 1)
    makers, judges = Adam(maker.parameters()), Adam(judge.parameters())
    for _ in range(STEPS):
        (judge(batch()[0]).mean() - judge(maker(torch.randn(16, 4))).mean()).backward()
        judges.step()  # here
        judges.zero_grad()
        makers.zero_grad()


def wrong_lbfgs_old_copy() -> None:
    net = made(8, 16, 1)
    optimizer = torch.optim.LBFGS(copy.deepcopy(net).parameters())  # here
    x, y = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def wrong_adapters_not_added() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)  # here
    net[0][0] = Adapted(net[0][0])
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_backward_twice() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = error(net)
        loss.backward(retain_graph=True)
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def wrong_backward_twice_divided() -> None:
    """As by a library that divides the loss within each call."""
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = error(net)
        (loss / 1).backward(retain_graph=True)
        (loss / 1).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def terms_of_several_backwards() -> None:
    """A parameter and a penalty that are terms of each micro-batch's loss."""
    net, width = made(8, 16, 1), nn.Parameter(torch.zeros(()))
    optimizer = SGD([*net.parameters(), width], lr=0.1)
    for _ in range(STEPS):
        penalty = 0.01 * net[-1].weight.square().mean()
        for _ in range(2):
            loss = error(net) * torch.exp(-width) + width + penalty
            (loss / 2).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def wrong_sum_so_far() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        total = 0
        for _ in range(2):
            total = total + error(net) / 2
            total.backward(retain_graph=True)  # here
        optimizer.step()
        optimizer.zero_grad()


def backward_twice_after_zero_grad() -> None:
    """A loss whose gradient is measured by itself before that of the whole one."""
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = error(net)
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        (loss + 0.01 * net[-1].weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_zeroed_after_clip() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        clip_grad_norm_(net.parameters(), 0.1)
        net[0][0].bias.grad.zero_()
        optimizer.step()  # here
        optimizer.zero_grad()


def wrong_zeroes_another() -> None:
    net = made(8, 16, 1)
    optimizer, old = SGD(net.parameters(), lr=0.1), SGD(made(8, 1).parameters(), lr=0.1)
    for _ in range(STEPS):
        old.zero_grad()
        error(net).backward()  # here
        optimizer.step()


def one_optimizer_for_each_phase() -> None:
    """Gradients of what the second phase alone trains stay, and no step uses them."""
    net = made(8, 16, 1)
    first, second = SGD(net[-1].parameters(), lr=0.1), SGD(net.parameters(), lr=0.1)
    for optimizer in (first, second):
        for _ in range(STEPS):
            optimizer.zero_grad()
            error(net).backward()
            optimizer.step()


def parts_called_alone() -> None:
    """The model as a whole evaluates, and its parts train, with accumulation."""
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        with torch.no_grad():
            error(net)
        for _ in range(2):
            x, y = batch()
            (F.mse_loss(net[1](net[0](x)), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_moved_by_hand_too() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()  # here
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        optimizer.zero_grad()


def wrong_rate_of_a_group() -> None:
    net = made(8, 16, 1)
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters()}]
    optimizer = SGD(groups, lr=0.1)  # here
    plan = lr_scheduler.LambdaLR(optimizer, [lambda epoch: epoch // 100, lambda epoch: 1.0])
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        plan.step()
        optimizer.zero_grad()


def wrong_clips_gradients() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        error(net).backward()
        clip_grad_norm_([p.grad for p in net.parameters()], 0.1)  # here
        optimizer.step()
        optimizer.zero_grad()


def wrong_seed_of_a_sampler() -> None:
    net = wrapped(made(8, 16, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    sampler = torch.utils.data.DistributedSampler(data, seed=dist.get_rank())
    for (x,) in torch.utils.data.DataLoader(data, 8, sampler=sampler):  # here
        F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Scaled(nn.Module):
    """A model with parameters in a list, which `parameters` does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales = made(8, 16, 1), [nn.Parameter(torch.ones(16))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[1](self.net[0](x) * self.scales[0])


def wrong_parameters_in_a_list() -> None:
    net = Scaled()
    optimizer = SGD(net.parameters(), lr=0.1)  # here
    for _ in range(STEPS):
        error(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_rest_of_an_epoch() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for number in range(4 * STEPS + 1):
        (error(net) / 4).backward()  # here
        if number % 4 == 3 or number == 4 * STEPS:
            optimizer.step()
            optimizer.zero_grad()


def wrong_by_tokens_and_micro_batches() -> None:
    net = made(8, 16, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [masked() for _ in range(2)]
        total = torch.stack([mask.sum() for *_, mask in parts]).sum()
        for part in parts:
            (errors(net, part).sum() / total / len(parts)).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
    globals()[sys.argv[1]]()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
