"""Comparison of the plan's memory with torch's memory tracker, run on a step of the real engine.

One process is rank 0 of a fake process group of any size, with fake tensors: `fully_shard`, the
collectives and the optimizer run as in training, and nothing is allocated
(torch.distributed._tools.fsdp2_mem_tracker).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.engine.model.freezing import freeze_
from colotrain.engine.sharding.grouping import find_groups
from colotrain.engine.sharding.sharded_model import (
    ShardedModel,
    begin_backward,
    begin_forward,
    shard_,
)
from colotrain.errors import ColotrainError, ConfigError, Problem, message_of
from colotrain.models.loading import build_on_meta
from colotrain.models.objective import as_global_batch, attach_, output_of
from colotrain.planner.layout import layout_of
from colotrain.planner.memory import predict
from colotrain.planner.traced.survey import one_sample, survey, tied_names
from colotrain.planner.traced.tracing import Batch, NotTraceable, loss_of, trace
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.optimizers import OPTIMIZERS, optimizer_of
from colotrain.spec.plan import RunPlan
from colotrain.torch_internals import FakeTensorMode, fake_store, memory_tracker

KINDS = {
    "Sharded Param": "parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "Unsharded Param": "gathered",
    "OptState": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Buffer": "buffers",
    "All Gather": "buffers",
    "Reduce Scatter": "buffers",
}
"""The tracker's category → the category of the plan's breakdown."""


def cross_check(plan: RunPlan) -> dict[str, Any]:
    """Bytes by category at the peak, and in total, as planned and as tracked."""
    if dist.is_initialized():
        raise ColotrainError("the cross-check makes a process group of its own", "run it alone")
    played = [name for name, known in OPTIMIZERS.items() if known.is_elementwise]
    if plan.optim.name not in played:
        expected = f"one of {', '.join(played)} under --trace"
        raise _cannot("optim.name", plan.optim.name, expected)
    if plan.optim.rounding == "kahan":
        raise _cannot("optim.rounding", "kahan", "nearest or stochastic under --trace")
    sample = one_sample(plan.data, plan.model)
    ours = _by_plan(plan, sample)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = _by_tracker(plan, sample)
    names = [
        field.name for field in dataclasses.fields(MemoryBreakdown) if field.name != "baseline"
    ]
    pairs = {name: {"plan": ours[name], "tracker": theirs.get(name, 0)} for name in names}
    pairs["peak"] = {"plan": sum(ours.values()), "tracker": theirs["peak"]}
    return {"world_size": plan.world_size, "categories": pairs}


def _by_plan(plan: RunPlan, sample: Batch) -> dict[str, int]:
    """Planned bytes by category as for GPUs: no shared memory, no malloc heap, no baseline."""
    layout = layout_of(
        plan.plugin,
        plan.batch,
        optim=plan.optim,
        precision=plan.train.precision,
        device="cuda",
    )
    for key, size in plan.mesh.above_one.items():
        raise _cannot(key, str(size), "1 under --trace")
    model = build_on_meta(plan.model)
    key, value = plan.model.key, plan.model.value
    if model is None:
        raise _cannot(key, value, "a model that can be built on the meta device under --trace")
    freeze_(model, plan.freeze)
    try:
        followed = trace(
            model,
            sample,
            precision=plan.train.precision,
            checkpointing=plan.train.activation_checkpointing,
            device="cpu",
            micro_batch=plan.batch.micro_batch,
        )
    except NotTraceable as error:
        why = message_of(error).partition("\n")[0]
        expected = f"a model that runs without values under --trace ({why})"
        raise _cannot(key, value, expected) from error
    surveyed = survey(plan.model, plan.freeze, plan.data.seq_len)
    breakdown = predict(dataclasses.replace(layout, baseline=0), surveyed, followed).breakdown
    return {f.name: getattr(breakdown, f.name) for f in dataclasses.fields(breakdown)}


def _batch(plan: RunPlan, sample: Batch, device: str) -> Batch:
    size = plan.batch.micro_batch
    return {
        name: torch.zeros((size, *tensor.shape), dtype=tensor.dtype, device=device)
        for name, tensor in sample.items()
    }


def _cannot(key: str, value: str | None, expected: str) -> ConfigError:
    fix = "leave out --trace"
    return ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _by_tracker(plan: RunPlan, sample: Batch) -> dict[str, int]:
    with _fake_ranks(plan.world_size):
        comms = Groups(plan.ranks, "cpu")
        model = build_on_meta(plan.model)
        assert model is not None
        attach_(model, plan.model)
        freeze_(model, plan.freeze)
        trial = _batch(plan, sample, "meta")
        groups = find_groups(model, chunk_bytes=plan.plugin.chunk_bytes, batch=trial)
        checkpoint_blocks_(model, plan.train.activation_checkpointing)
        tied = tied_names(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            sharded = shard_(model, plan, comms, groups)
            model.to_empty(device="cpu")
            _tie_again(model, tied)
            trained = [p for p in module_tree.parameters(model) if p.requires_grad]
            optimizer = _optimizer(plan, trained)
            batch = _batch(plan, sample, "cpu")
            _step(sharded, optimizer, batch, plan)
            tracker = memory_tracker()(model, optimizer)
            with tracker:
                _step(sharded, optimizer, batch, plan, tracker)
            return _snapshot(tracker)


def _optimizer(plan: RunPlan, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    known = optimizer_of(plan.optim.name)
    if known.state_tensors == 2:
        return torch.optim.AdamW(trained, lr=plan.optim.lr, foreach=False)
    momentum = plan.optim.betas[0] if known.momentum_is_optional else 0.9
    return torch.optim.SGD(trained, lr=plan.optim.lr, momentum=momentum, foreach=False)


def _tie_again(model: nn.Module, tied: dict[str, tuple[str, ...]]) -> None:
    """Tie parameters again that `to_empty` has split."""
    for owner, others in tied.items():
        for module, _, leaf in (name.rpartition(".") for name in others):
            setattr(model.get_submodule(module), leaf, model.get_parameter(owner))


def _step(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    plan: RunPlan,
    tracker: Any = None,
) -> None:
    for index in range(plan.batch.accumulation_steps):
        begin_forward(sharded)
        begin_backward(sharded, last=index == plan.batch.accumulation_steps - 1)
        if tracker is not None:
            tracker.reset_mod_stats()  # it tracks one micro-batch at a time
        loss_of(output_of(sharded.module, as_global_batch(sharded.module, batch))).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _snapshot(tracker: Any) -> dict[str, int]:
    found: dict[str, int] = {"peak": 0}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, num_bytes in kinds.items():
            name = "peak" if kind == "Total" else KINDS.get(getattr(kind, "value", kind), "buffers")
            found[name] = found.get(name, 0) + int(num_bytes)
    return found
