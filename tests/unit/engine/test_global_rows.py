"""What a loss needs to know of its global batch is the same however that is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.read.loader import BatchLoader, SampleOrder
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.step import global_rows
from colotrain.models.facts import facts_of
from colotrain.models.objectives.base import POSITIONS, GlobalRows, Objective
from colotrain.spec.axes import STAGE, MeshPlan, Ranks
from colotrain.spec.plan import BatchPlan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen += len(input_ids)  # type: ignore[operator]
        torch.rand(3)
        return input_ids.double() ** 2


class Numbers:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index, 7])}


def run_of(rank: int, *, world: int, micro_batch: int, steps: int, end: int | None) -> Any:
    model = Model()
    rows = GlobalRows(
        rows=lambda model, batch: model(input_ids=batch["input_ids"])[:, 0],
        entries=lambda rows: {"rows": rows},
    )
    facts_of(model).objective = Objective("mine", lambda *_: None, dict, global_rows=rows)
    size = world * micro_batch * steps
    batch = BatchPlan(
        global_batch=size, micro_batch=micro_batch, accumulation_steps=steps, data_parallel=world
    )
    loader = BatchLoader(Numbers(), SampleOrder(100, 0, True), batch, rank, end=end)
    plan = SimpleNamespace(
        batch=batch,
        ranks=Ranks.of(MeshPlan(), world=world, shard=None),
        train=SimpleNamespace(compile=False),
    )
    comms = {STAGE: None}
    sharded = SimpleNamespace(module=model, calls=[], groups=[], stage=Stage(), comms=comms)
    device = torch.device("cpu")
    run = SimpleNamespace(plan=plan, sharded=sharded, device=device, beat=lambda: None)
    return run, loader


def passed(
    monkeypatch: pytest.MonkeyPatch, *, world: int, micro_batch: int, steps: int, end: int | None
) -> dict[int, float]:
    """Number of a sample in the second global batch → the sum of all rows that its loss gets.

    Each sample's own row is the one at its position.
    """
    runs = [
        run_of(rank, world=world, micro_batch=micro_batch, steps=steps, end=end)
        for rank in range(world)
    ]
    own: list[Tensor] = []

    def collect(gathered: list[Tensor], rows: Tensor, group: Any) -> None:
        own.append(rows)

    def gather(gathered: list[Tensor], rows: Tensor, group: Any) -> None:
        for into, one in zip(gathered, own, strict=True):
            into.copy_(one)

    monkeypatch.setattr(dist, "all_gather", collect)
    for run, loader in runs:
        list(global_rows.micro_batches(run, loader, 1, steps))
    monkeypatch.setattr(dist, "all_gather", gather)
    found: dict[int, float] = {}
    for run, loader in runs:
        before = torch.get_rng_state()
        batches = list(global_rows.micro_batches(run, loader, 1, steps))
        assert torch.equal(before, torch.get_rng_state())  # the step draws the same again
        assert float(run.sharded.module.seen) == 0
        for index, batch in enumerate(batches):
            numbers = batch["input_ids"][:, 0].tolist()
            for number, at in zip(numbers, batch[POSITIONS].tolist(), strict=True):
                assert float(batch["rows"][at]) == number**2
                if loader.positions(1, index):
                    found[number] = float(batch["rows"].sum())
    return found


@pytest.mark.parametrize("end", [None, 19, 13])
def test_every_division_of_a_global_batch_shares_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    whole = passed(monkeypatch, world=1, micro_batch=12, steps=1, end=end)
    assert len(whole) == 12 if end is None else end - 12
    assert len(set(whole.values())) == 1
    assert next(iter(whole.values())) == sum(number**2 for number in whole)
    for world, micro_batch, steps in ((1, 3, 4), (2, 3, 2), (3, 4, 1), (2, 1, 6)):
        divided = passed(monkeypatch, world=world, micro_batch=micro_batch, steps=steps, end=end)
        assert divided == whole, (world, micro_batch, steps)
