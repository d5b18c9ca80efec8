"""All ranks build the same: users' builders are seeded, and what differs is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from colotrain.data.read.loader import BatchLoader, SampleOrder
from colotrain.data.read.samples import StreamSamples
from colotrain.data.read.weighted import WeightedOrder
from colotrain.engine.comms.agreement import check_alike, check_filled_alike
from colotrain.engine.step.inputs import open_loaders
from colotrain.errors import UsageError
from colotrain.generators import seeded
from colotrain.models.loading import build
from colotrain.rundir import RunDir
from colotrain.spec.plan import ModelPlan, RunPlan
from tests.dist.test_transport import run


def shuffled() -> list[dict[str, Any]]:
    """A user's data set in an order of its own, drawn from every generator there is."""
    numbers = list(range(64))
    random.shuffle(numbers)
    numbers = [numbers[i] for i in np.random.permutation(64)]
    numbers = [numbers[i] for i in torch.randperm(64).tolist()]
    return [{"x": torch.tensor([float(n)])} for n in numbers]


def drawn() -> nn.Module:
    """A model whose shape and values come from every generator there is."""
    model = nn.Linear(random.randint(2, 20), int(np.random.randint(2, 20)))
    model.bias.data.fill_(random.random())
    return model


def plan_of_data(ranks: int) -> RunPlan:
    from tests.dist.test_difficult_models import plan_of  # ranks need none of what this imports

    own = (f"data.target={__name__}:shuffled", "data.validation_fraction=0.25")
    return plan_of("Stack", "zero2", *own, f"cluster.procs_per_node={ranks}")


def numbers_of(loader: BatchLoader | None) -> list[float]:
    assert loader is not None
    return [loader.samples[i]["x"].item() for i in range(len(loader.samples))]


def test_builders_draw_the_same_numbers_in_every_call(tmp_path: Path) -> None:
    plan, found = plan_of_data(2), []
    for seed in (1, 2):  # whatever was drawn before
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        loaders = open_loaders(plan, 0, RunDir(tmp_path))
        splits = [numbers_of(loader) for loader in loaders]
        datasets = {id(loader.samples.dataset) for loader in loaders if loader is not None}
        assert len(datasets) == 1  # built once, for both splits
        model = build(ModelPlan(target=f"{__name__}:drawn"), seed=3)
        found.append((splits, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1]
    train, validation = found[0][0]
    assert sorted(train + validation) == [float(n) for n in range(64)]
    assert train != sorted(train)


class Rows:
    """A data set that may differ between ranks."""

    def __init__(self, length: int, first: float, noise: bool = False) -> None:
        self.length, self.first, self.noise = length, first, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        augmented = np.random.default_rng().random() if self.noise else random.random()
        return {"x": torch.tensor([self.first + index, augmented])}


class Stream(IterableDataset[dict[str, Any]]):
    """A stream that may give each rank samples of its own, as scripts for DDP do."""

    def __init__(self, rank: int, noise: bool = False) -> None:
        self.rank, self.noise = rank, noise

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = Rows(8, 0.0, self.noise)
        return (rows[index] for index in range(self.rank, 8, 2 if self.rank else 1))


def stream_of(rank: int, noise: bool = False) -> StreamSamples:
    with seeded(0):  # as a run opens its data
        return StreamSamples(Stream(rank, noise), lambda: Stream(rank, noise))


def loader_of(plan: RunPlan, samples: Rows | StreamSamples) -> BatchLoader:
    return BatchLoader(samples, SampleOrder(len(samples), seed=0, shuffle=False), plan.batch, 0)


def refuses_another_order(rank: int, plan: RunPlan) -> None:
    """As of weights that `data.sampler` draws on each rank."""
    order = WeightedOrder(SampleOrder(8, 0, False, 1), np.arange(1.0, 9.0) + rank)
    loader = BatchLoader(Rows(8, 0.0), order, plan.batch, 0)
    with pytest.raises(UsageError, match="the order of the train data is"):
        check_alike(nn.Linear(2, 2, device="meta"), {"train": loader}, seed=0)
    dist.barrier()


def test_ranks_with_different_orders_of_samples_are_refused() -> None:
    run(refuses_another_order, 2, plan_of_data(2))


def differs_here(rank: int, plan: RunPlan) -> None:
    same = nn.Linear(2, 2)
    nn.init.ones_(same.weight), nn.init.zeros_(same.bias)
    odd = nn.Linear(2, 2)
    nn.init.constant_(odd.weight, 1.0), nn.init.zeros_(odd.bias)
    odd.weight.data[0, rank] = 2.0  # the same values in another order
    wider, frozen = nn.Linear(2, 2 + rank), nn.Linear(2, 2, device="meta")
    frozen.weight.requires_grad_(rank == 0)
    buffers = nn.BatchNorm1d(2, affine=False)
    buffers.running_mean.fill_(rank)  # type: ignore[union-attr]
    cases: list[tuple[str, nn.Module, Rows | StreamSamples]] = [
        ("parameter weight is float32", odd, Rows(8, 0.0)),
        (r"parameter weight is float32 \[2, 2\].*, and float32 \[3, 2\]", wider, Rows(8, 0.0)),
        ("parameter weight is .*trained, and .*frozen", frozen, Rows(8, 0.0)),
        ("buffer running_mean is", buffers, Rows(8, 0.0)),
        ("the length of the train data is 8, and 9", same, Rows(8 + rank, 0.0)),
        ("sample 0 of the train data is", same, Rows(8, float(rank))),
        ("the first sample of the train stream is", same, stream_of(rank)),
    ]
    for says, model, rows in cases:
        with pytest.raises(UsageError, match=f"ranks 0 and 1 built something else: {says}"):
            check_alike(model, {"train": loader_of(plan, rows), "validation": None}, seed=0)
    buffers.register_parameter("later", nn.Parameter(torch.empty(1, device="meta")))
    check_alike(buffers, {}, seed=0)  # init_weights() may still fill them
    with pytest.raises(UsageError, match="something else: buffer running_mean is"):
        check_filled_alike(buffers)
    for noise in (False, True):  # augmentation is no difference
        random.seed(rank)
        for samples in (Rows(8, 0.0, noise), stream_of(0, noise)):
            check_alike(same, {"train": loader_of(plan, samples)}, seed=0)
    dist.barrier()


def test_what_differs_between_ranks_is_named_on_every_rank() -> None:
    run(differs_here, 2, plan_of_data(2))
