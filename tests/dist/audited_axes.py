"""Training scripts whose ranks share a model, a sequence or experts, right and wrong ones.

`python audited_axes.py NAME` with RANK and WORLD_SIZE; as `audited_idioms.py`, which explains the
names and `# here`. Every script divides a step into two micro-batches.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
WIDE, LONG = 8, 4
STEPS, MICRO_BATCHES = 3, 2


def line(size: int = 2) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours."""
    return dist.init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "own"))[
        "own"
    ].get_group()


def across(size: int = 2) -> dist.ProcessGroup:
    """The ranks that have this rank's place in the other groups of `size` neighbours."""
    return dist.init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "own"))[
        "dp"
    ].get_group()


def average(parameters, group=None, *, of: int = 0) -> None:
    """Sum gradients over a group, and divide them by its size or by another number."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= of or dist.get_world_size(group)


def batches(reader: int):
    draw = torch.Generator().manual_seed(100 + reader)
    while True:
        x = torch.randn(3, LONG, WIDE, generator=draw)
        yield x, x.cumsum(1)[..., :1]


def trained(
    net, reader: int, *, between=lambda: None, loss_of=None, optimizer=None, micro=MICRO_BATCHES
) -> None:
    optimizer = optimizer or SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    data = batches(reader)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x, y = next(data)
            loss = F.mse_loss(net(x), y) if loss_of is None else loss_of(net, x, y)
            (loss / micro).backward()  # here
        between()
        optimizer.step()  # here
        optimizer.zero_grad()


class Copied(torch.autograd.Function):
    """The same forward; backward sums over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """Forward sums over the group; the same backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def parts_of(x: torch.Tensor, group) -> torch.Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return x.chunk(size, 1)[rank].contiguous()


def all_of(x: torch.Tensor, group) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.cat(every, 1)


def sum_of_parts(x: torch.Tensor, group) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return parts_of(x, group)


class Gathered(torch.autograd.Function):
    """Forward gathers parts along the sequence; backward sums and takes this rank's part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_of(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of_parts(gradient, ctx.group), None


class GatheredForCopies(Gathered):
    """What follows is the same on all ranks, so that backward takes this rank's part alone."""

    @staticmethod
    def backward(ctx, gradient):
        return parts_of(gradient, ctx.group), None


class Scattered(torch.autograd.Function):
    """Forward sums and takes this rank's part of the sequence; backward gathers."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return sum_of_parts(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_of(gradient, ctx.group), None


class Split(nn.Module):
    """A block whose two matrices are split by hand; norm and head are copies on all ranks."""

    def __init__(self, group, *, by_sequence: bool = False) -> None:
        super().__init__()
        self.group, self.by_sequence = group, by_sequence
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, 1)
        torch.manual_seed(1 + rank)
        self.up = nn.Linear(WIDE, 16 // size)
        self.down = nn.Linear(16 // size, WIDE, bias=False)

    def forward(self, x):
        if self.by_sequence:
            x = parts_of(x, self.group)
            hidden = Gathered.apply(self.norm(x), self.group)
            x = x + Scattered.apply(self.down(self.up(hidden).tanh()), self.group)
            return self.head(GatheredForCopies.apply(x, self.group))
        hidden = Copied.apply(self.norm(x), self.group)
        return self.head(x + Summed.apply(self.down(self.up(hidden).tanh()), self.group))


def split_by_hand() -> None:
    trained(Split(line(WORLD)), 0)


def split_by_hand_and_by_data() -> None:
    net, group = Split(line()), across()
    trained(net, RANK // 2, between=lambda: average(net.parameters(), group))


def split_by_sequence() -> None:
    net = Split(line(WORLD), by_sequence=True)
    trained(net, 0, between=lambda: average(net.norm.parameters(), of=1))


def split_by_sequence_and_by_data() -> None:
    net, own, group = Split(line(), by_sequence=True), line(), across()

    def exchange() -> None:
        average(net.norm.parameters(), own, of=1)
        average(net.parameters(), group)

    trained(net, RANK // 2, between=exchange)


def wrong_norm_is_not_summed() -> None:
    trained(Split(line(WORLD), by_sequence=True), 0)


def wrong_norm_is_averaged() -> None:
    net = Split(line(WORLD), by_sequence=True)
    trained(net, 0, between=lambda: average(net.norm.parameters()))


def wrong_copies_are_summed() -> None:
    net = Split(line(WORLD))
    trained(net, 0, between=lambda: average([*net.norm.parameters(), *net.head.parameters()], of=1))


def wrong_parts_are_averaged() -> None:
    """All ranks average all gradients, as if parts were copies."""
    net = Split(line(WORLD))
    trained(net, 0, between=lambda: average(net.parameters()))


def wrong_not_averaged_over_data() -> None:
    net, group = Split(line()), across()
    trained(net, RANK // 2, between=lambda: average(net.up.parameters(), group))


def whole_norm(net: Split, *, copies_once: bool) -> torch.Tensor:
    parts = [*net.up.parameters(), *net.down.parameters()]
    copies = [*net.norm.parameters(), *net.head.parameters()]
    squares = sum(p.grad.square().sum() for p in parts)
    of_copies = sum(p.grad.square().sum() for p in copies)
    if not copies_once:
        squares = squares + of_copies
    dist.all_reduce(squares)
    return (squares + of_copies * copies_once).sqrt()


def clipped_by_hand() -> None:
    net = Split(line(WORLD))

    def clip() -> None:
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.05, whole_norm(net, copies_once=True))

    trained(net, 0, between=clip)


def wrong_norm_counts_copies_twice() -> None:
    net = Split(line(WORLD))

    def clip() -> None:
        norm = whole_norm(net, copies_once=False)
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.05, norm)  # here

    trained(net, 0, between=clip)


def wrong_norm_of_own_parts() -> None:
    net = Split(line(WORLD))
    trained(net, 0, between=lambda: clip_grad_norm_(net.parameters(), 0.05))  # here


# -- torch's own tensor parallelism ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, 1)
        self.up, self.down = nn.Linear(WIDE, 16), nn.Linear(16, WIDE)

    def forward(self, x):
        return self.head(x + self.down(self.up(self.norm(x)).tanh()))


def parallelized(mesh, **more) -> Block:
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel(), **more}
    return parallel.parallelize_module(Block(), mesh, plan)


def two_by_two():
    return dist.init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))


def by_torch() -> None:
    trained(parallelized(dist.init_device_mesh("cpu", (WORLD,))), 0)


def by_torch_and_clipped() -> None:
    net = parallelized(dist.init_device_mesh("cpu", (WORLD,)))
    optimizer = AdamW(net.parameters(), lr=0.01)
    trained(
        net,
        0,
        between=lambda: clip_grad_norm_([*net.up.parameters(), *net.down.parameters()], 0.05),
        optimizer=optimizer,
    )


def by_torch_and_sharded() -> None:
    mesh = two_by_two()
    net = parallelized(mesh["tp"])
    trained(fully_shard(net, mesh=mesh["dp"]), RANK // 2)


def in_sequence_by_torch() -> None:
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    net = parallelized(
        mesh,
        norm=parallel.SequenceParallel(),
        up=parallel.ColwiseParallel(input_layouts=Shard(1)),
        down=parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        head=parallel.SequenceParallel(),
    )

    def loss_of(net, x, y):
        x = distribute_tensor(x, mesh, [Shard(1)])
        return F.mse_loss(net(x).full_tensor(), y)

    trained(net, 0, loss_of=loss_of)


def all_by_torch_and_clipped() -> None:
    """Every parameter, every activation and the loss are DTensors."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    net = Block()
    places = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for name, parameter in list(net.named_parameters()):
        whole = distribute_tensor(parameter.detach(), mesh, [places.get(name, Replicate())])
        module, _, key = name.rpartition(".")
        net.get_submodule(module).register_parameter(key, nn.Parameter(whole))

    def loss_of(net, x, y):
        x, y = (distribute_tensor(each, mesh, [Replicate()]) for each in (x, y))
        return F.mse_loss(net(x), y)

    trained(net, 0, loss_of=loss_of, between=lambda: clip_grad_norm_(net.parameters(), 0.05))


def split_classes() -> None:
    """The head's classes are split over ranks, and so is the cross-entropy."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    net = Block()
    net.head = nn.Linear(WIDE, 6)
    plan = {
        "up": parallel.ColwiseParallel(),
        "down": parallel.RowwiseParallel(),
        "head": parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    net = parallel.parallelize_module(net, mesh, plan)
    optimizer, data = SGD(net.parameters(), lr=0.05), batches(0)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x, y = next(data)
            targets = y.flatten().abs().long() % 6
            with parallel.loss_parallel():
                loss = F.cross_entropy(net(x).flatten(0, 1), targets) / MICRO_BATCHES
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_summed_after_each_backward() -> None:
    """The norm's gradients so far are summed over ranks again with each micro-batch."""
    net = Split(line(WORLD), by_sequence=True)
    for parameter in net.norm.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    trained(net, 0)


def wrong_all_summed_after_each_backward() -> None:
    net = Attending(line(1))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    trained(net, RANK)


def stages() -> None:
    """Two stages of a pipeline, which send activations and their gradients."""
    torch.manual_seed(RANK)
    net = nn.Sequential(nn.Linear(WIDE, WIDE) if RANK == 0 else nn.Linear(WIDE, 1))
    optimizer, data = SGD(net.parameters(), lr=0.05), batches(0)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x, y = next(data)
            if RANK == 0:
                out = net(x)
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                between = torch.empty(3, LONG, WIDE)
                dist.recv(between, 0)
                between.requires_grad_()
                (F.mse_loss(net(between), y) / MICRO_BATCHES).backward()
                dist.send(between.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


def adapters_by_torch() -> None:
    net = parallelized(dist.init_device_mesh("cpu", (WORLD,)))
    for parameter in net.up.parameters():
        parameter.requires_grad_(False)
    trained(net, 0)


def wrong_readers_of_parts() -> None:
    """Each rank of a tensor-parallel group reads samples of its own."""
    trained(parallelized(dist.init_device_mesh("cpu", (WORLD,))), RANK)


def wrong_readers_of_groups() -> None:
    """All tensor-parallel groups read the same samples."""
    mesh = two_by_two()
    trained(fully_shard(parallelized(mesh["tp"]), mesh=mesh["dp"]), 0)


def wrong_undivided() -> None:
    mesh = two_by_two()
    trained(fully_shard(parallelized(mesh["tp"]), mesh=mesh["dp"]), RANK // 2, micro=1)


def wrong_part_in_no_optimizer() -> None:
    net = parallelized(dist.init_device_mesh("cpu", (WORLD,)))
    held = [p for name, p in net.named_parameters() if "down" not in name]
    trained(net, 0, optimizer=SGD(held, lr=0.05))  # here


# -- parts of the sequence ------------------------------------------------------------------------


class Attending(nn.Module):
    """Each rank has a part of the sequence; keys and values are gathered."""

    def __init__(self, group) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        both = Gathered.apply(torch.cat([k, v], -1), self.group)
        k, v = both.chunk(2, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v))


def of_own_part(group, *, by: float = 1.0):
    def loss_of(net, x, y):
        return F.mse_loss(net(parts_of(x, group)), parts_of(y, group)) / by

    return loss_of


def context_parallel() -> None:
    group = line(WORLD)
    net = DistributedDataParallel(Attending(group))
    trained(net, 0, loss_of=of_own_part(group))


def context_and_data_parallel() -> None:
    group = line()
    net = DistributedDataParallel(Attending(group))
    trained(net, RANK // 2, loss_of=of_own_part(group))


def sharded_context() -> None:
    group = line()
    trained(fully_shard(Attending(group)), RANK // 2, loss_of=of_own_part(group))


def wrong_divided_by_parts() -> None:
    group = line(WORLD)
    net = DistributedDataParallel(Attending(group))

    def loss_of(net, x, y):
        loss = F.mse_loss(net(parts_of(x, group)), parts_of(y, group))
        return loss / WORLD  # here

    trained(net, 0, loss_of=loss_of)


def wrong_exchanged_over_data_alone() -> None:
    group, others = line(), across()
    net = Attending(group)
    trained(
        net,
        RANK // 2,
        loss_of=of_own_part(group),
        between=lambda: average(net.parameters(), others),
    )


# -- experts --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Each rank of a group has one expert; tokens of all its ranks pass through all."""

    def __init__(self, group) -> None:
        super().__init__()
        self.group, size = group, dist.get_world_size(group)
        torch.manual_seed(0)
        self.embed, self.router = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, size)
        self.head = nn.Linear(WIDE, 1)
        torch.manual_seed(1 + dist.get_rank(group))
        self.expert = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        x = self.embed(x)
        gates = self.router(x).softmax(-1)
        tokens, gates = (Gathered.apply(each, self.group) for each in (x, gates))
        own = gates[..., dist.get_rank(self.group), None] * self.expert(tokens)
        return self.head(x + Scattered.apply(own, self.group))

    def copies(self) -> list:
        return [p for name, p in self.named_parameters() if "expert" not in name]


def experts() -> None:
    net = Mixed(line(WORLD))

    def exchange() -> None:
        average(net.copies())
        for parameter in net.expert.parameters():
            parameter.grad /= WORLD

    trained(net, RANK, between=exchange)


def experts_and_data() -> None:
    net, group = Mixed(line()), across()

    def exchange() -> None:
        average(net.copies())
        average(net.expert.parameters(), group, of=WORLD)

    trained(net, RANK, between=exchange)


class Experts(nn.Module):
    """All experts in one parameter, which is sharded while it is used."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.mesh, self.group = mesh, mesh.get_group()
        torch.manual_seed(0)
        self.embed, self.router = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, mesh.size())
        self.head = nn.Linear(WIDE, 1)
        weights = torch.randn(mesh.size(), WIDE, WIDE) / WIDE
        self.experts = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))

    def forward(self, x):
        x = self.embed(x)
        gates = self.router(x).softmax(-1)
        tokens, gates = (Gathered.apply(each, self.group) for each in (x, gates))
        own = gates[..., self.mesh.get_local_rank(), None] * (tokens @ self.experts.to_local()[0])
        return self.head(x + Scattered.apply(own, self.group))


def experts_in_one_parameter() -> None:
    net = Experts(dist.init_device_mesh("cpu", (WORLD,)))

    def exchange() -> None:
        average([p for name, p in net.named_parameters() if name != "experts"])
        net.experts.grad.to_local().div_(WORLD)

    trained(net, RANK, between=exchange)


def wrong_experts_of_all_losses() -> None:
    """Experts have the sum of all ranks' losses, everything else their mean."""
    net = Mixed(line(WORLD))
    trained(net, RANK, between=lambda: average(net.copies()))


def wrong_router_is_not_exchanged() -> None:
    net = Mixed(line(WORLD))

    def exchange() -> None:
        average([p for name, p in net.named_parameters() if "embed" in name or "head" in name])
        for parameter in net.expert.parameters():
            parameter.grad /= WORLD

    trained(net, RANK, between=exchange)


def wrong_experts_are_averaged() -> None:
    """Each rank's expert gets the mean of all experts' gradients."""
    net = Mixed(line(WORLD))
    trained(net, RANK, between=lambda: average(net.parameters()))


def wrong_one_parameter_of_all_losses() -> None:
    net = Experts(dist.init_device_mesh("cpu", (WORLD,)))
    copies = [p for name, p in net.named_parameters() if name != "experts"]
    trained(net, RANK, between=lambda: average(copies))


def main() -> None:
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
