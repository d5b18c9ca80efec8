"""What of a run is in a checkpoint, and what is said where another run's is taken up."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.state import index
from colotrain.engine.state.other_settings import other_samples
from colotrain.engine.state.pieces import model_state
from colotrain.errors import ColotrainError
from colotrain.records import to_plain
from colotrain.runs.resolving import plan_from
from colotrain.spec import axes
from tests.copies import Ranks


class Reticent(nn.Module):
    """Its own `state_dict` leaves out what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.twin = self.linear
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"seen": self.seen}


def test_a_state_dict_of_ones_own_leaves_nothing_out_of_a_checkpoint() -> None:
    module = Reticent()
    sharded: Any = SimpleNamespace(
        module=module, groups=(), named_parameters=module.named_parameters
    )
    assert dict(model_state(sharded)).keys() == {"linear.weight", "linear.bias", "seen"}


@pytest.mark.parametrize("kind", ["long", "deep", "fifo", "link"])
def test_an_index_that_is_no_document_of_bounded_size_is_not_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MOST_OF_INDEX", 1 << 20)
    path = tmp_path / index.INDEX
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 1000 + "]" * 1000)
    if kind == "long":
        os.truncate(path, 1 << 40)
    with pytest.raises(ColotrainError, match="not an index of a checkpoint"):
        index.read_index(tmp_path)


def test_another_order_of_samples_is_announced() -> None:
    plan = plan_from(["recipe=llm-tiny", "cluster.procs_per_node=1"])
    manifest: Any = SimpleNamespace(plan=to_plain(plan), step=4, global_batch=8)
    data = SimpleNamespace(samples=range(40))
    assert other_samples(SimpleNamespace(plan=plan, train_data=data), manifest) == []  # type: ignore[arg-type]
    other = replace(
        plan,
        train=replace(plan.train, seed=plan.train.seed + 1, last_batch="drop"),
        data=replace(plan.data, shuffle=not plan.data.shuffle, workers=3),
    )
    run: Any = SimpleNamespace(plan=other, train_data=data)
    assert other_samples(run, manifest) == ["train.seed", "data.shuffle"]
    manifest.step = 6  # in the second epoch, which begins elsewhere
    assert other_samples(run, manifest) == ["train.seed", "data.shuffle", "train.last_batch"]


class Held:
    """Bytes in memory in place of a file; reading fails without them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_read = data, 0

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read_into(self, start: int, data: memoryview) -> None:
        if not self.data:
            raise OSError("is gone")
        self.num_read += len(data)
        data[:] = self.data[start : start + len(data)]


def stored(whole: torch.Tensor, *boxes: tuple[slice, ...]) -> index.Stored:
    chunks = []
    for box in boxes:
        part = whole[box].contiguous()
        source = Held(b"before" + bytes(bytes_of(part)))
        begin = tuple(s.start for s in box)
        chunks.append(index.Chunk(begin, tuple(part.shape), source, 6))
    return index.Stored(whole.dtype, tuple(whole.shape), tuple(chunks))


def test_a_part_is_read_from_files_that_have_other_parts() -> None:
    whole = torch.arange(7 * 6 * 2, dtype=torch.float64).view(7, 6, 2)
    ends = slice(0, 2)
    rows = (slice(0, 3), slice(3, 6), slice(6, 7))
    for kept in (
        stored(whole, *((r, slice(0, 6), ends) for r in rows)),
        stored(whole, *((slice(0, 7), c, ends) for c in (slice(0, 1), slice(1, 6)))),
        stored(whole, *((r, c, ends) for r in rows for c in (slice(0, 4), slice(4, 6)))),
    ):
        assert torch.equal(kept.read(), whole)
        for first in range(7):
            for column in range(6):
                into = torch.zeros(min(2, 7 - first), min(3, 6 - column), 1)
                kept.read_into(into, (first, column, 1))
                expected = whole[first : first + 2, column : column + 3, 1:]
                assert torch.equal(into.double(), expected)


def test_only_the_rows_that_are_needed_are_read() -> None:
    whole = torch.randn(100, 4)
    kept = stored(whole, (slice(0, 50), slice(0, 4)), (slice(50, 100), slice(0, 4)))
    kept.read_into(torch.empty(2, 4), (49, 0))
    assert [chunk.source.num_read for chunk in kept.chunks] == [16, 16]  # type: ignore[attr-defined]
    scalar = stored(torch.tensor(3.0), ())
    assert scalar.read().item() == 3
    assert stored(torch.empty(0, 4), (slice(0, 0), slice(0, 4))).read().shape == (0, 4)


def test_no_rank_goes_on_where_one_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, parts = Ranks(monkeypatch), PartMap(ranks=axes.Ranks({axes.DP_SHARD: 2}), rank=0)
    kept = stored(torch.tensor([1.0, 2.0]), (slice(0, 2),))
    gone = replace(kept, chunks=(replace(kept.chunks[0], source=Held(b"")),))

    def one(rank: int) -> str:
        part = parts.part_of("model.t", (2,), "t", is_sharded=False)
        with pytest.raises(OSError, match="is gone") as caught:
            index.load(
                {"model.t": torch.zeros(2)}, {"model.t": part}, {"model.t": [kept, gone][rank]}
            )
        return str(caught.value)

    assert ranks.run(2, one) == ["rank 1: is gone"] * 2


def test_no_rank_goes_on_with_numbers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, parts = Ranks(monkeypatch), PartMap(ranks=axes.Ranks({axes.DP_SHARD: 1}), rank=0)
    part = parts.part_of("model.t", (4,), "t", is_sharded=False)
    kept = stored(torch.arange(4.0), (slice(1, 4),))  # as another rank's own copy has

    def one(_: int) -> None:
        index.load({"model.t": torch.zeros(4)}, {"model.t": part}, {"model.t": kept})

    with pytest.raises(OSError, match=r"rank 0: model\.t: 3 of 4 values are there"):
        ranks.run(1, one)
