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

from colotrain.engine.state import checkpoint, dcp_json
from colotrain.engine.state.pieces import model_state
from colotrain.errors import ColotrainError
from colotrain.records import to_plain
from colotrain.runs.resolving import plan_from


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
    monkeypatch.setattr(dcp_json, "MOST_OF_INDEX", 1 << 20)
    path = tmp_path / dcp_json.INDEX
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 1000 + "]" * 1000)
    if kind == "long":
        os.truncate(path, 1 << 40)
    with pytest.raises(ColotrainError, match="not an index of a checkpoint"):
        dcp_json.read_index(tmp_path)


def test_another_order_of_samples_is_announced() -> None:
    plan = plan_from(["recipe=llm-tiny", "cluster.procs_per_node=1"])
    manifest: Any = SimpleNamespace(plan=to_plain(plan))
    assert checkpoint._other_samples(SimpleNamespace(plan=plan), manifest) == []  # type: ignore[arg-type]
    other = replace(
        plan,
        train=replace(plan.train, seed=plan.train.seed + 1),
        data=replace(plan.data, shuffle=not plan.data.shuffle, workers=3),
    )
    found = checkpoint._other_samples(SimpleNamespace(plan=other), manifest)  # type: ignore[arg-type]
    assert found == ["train.seed", "data.shuffle"]
