"""What a reference or a teacher says of the samples, kept in files of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.data.read.precomputed import WithPrecomputed
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.state.run_state import Stop
from colotrain.engine.step import precompute
from colotrain.models.llm import LLM
from colotrain.models.objective import kept_of
from colotrain.rundir import RunDir
from colotrain.spec.axes import Axis, Ranks
from colotrain.spec.objectives import DPO, DistillPlan
from colotrain.spec.plan import DataPlan, ModelPlan

VOCAB = 17
DISTILL = DistillPlan(teacher="", top_k=5, alpha=0.7, temperature=1.7)


def plan_of(kind: str, *, world: int = 1, tp: int = 1) -> Any:
    return SimpleNamespace(
        ranks=Ranks({Axis.DP_SHARD: world // tp, Axis.TP: tp}),
        batch=SimpleNamespace(micro_batch=3),
        train=SimpleNamespace(precision="fp32"),
        model=ModelPlan(target="", objective=DISTILL if kind == "teacher" else DPO()),
    )


def model_of() -> nn.Module:
    torch.manual_seed(1)
    model = LLM(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def opened(plan: Any, own: list[dict[str, Tensor]], folder: Path) -> WithPrecomputed:
    kept = kept_of(plan.model)
    assert kept is not None
    return WithPrecomputed(
        own, kept.entry, kept.empty, rundir=RunDir(folder), folder=folder / "x", split="train"
    )


def expected(model: nn.Module, kind: str, ids: Tensor) -> Tensor:
    """Of one sample, from all logits."""
    logs = model(input_ids=ids.view(-1, ids.shape[-1]))
    if kind == "reference":
        logs = logs.double().log_softmax(-1)
        return logs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)
    return (logs[0] / DISTILL.temperature).log_softmax(1).topk(5).values


@pytest.mark.parametrize("kind", ["reference", "teacher"])
def test_a_run_that_is_asked_to_stop_keeps_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """It stops before the next micro-batch, and computes the rest when it is resumed."""
    model, plan, reasons = model_of(), plan_of(kind), [None, None, "SIGTERM"]
    shape = (10, 2, 6) if kind == "reference" else (10, 6)
    ids = torch.randint(0, VOCAB, shape)
    labels = torch.cat([ids[..., 1:], torch.full_like(ids[..., :1], -100)], -1)
    own = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
    run: Any = SimpleNamespace(
        plan=plan,
        sharded=SimpleNamespace(module=model, calls={}, stage=Stage()),
        **{"device": torch.device("cpu"), "rank": 0, "at": lambda phase: None},
        stop=Stop(lambda: reasons.pop(0) if reasons else None),
    )
    monkeypatch.setattr(precompute, "reshard", lambda sharded: None)
    monkeypatch.setattr(precompute, "build_whole", lambda plan, seed: model)
    kept = kept_of(plan.model)
    assert kept is not None
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    samples, whole = (opened(plan, own, tmp_path / folder) for folder in ("a", "b"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad(), precompute.asked(run) as (model, stage):
            precompute.compute(run, model, stage, samples, [*range(10)], kept)
            assert run.stop.reason == "SIGTERM"
            run.stop.reason = None
            precompute.compute(run, model, stage, whole, [*range(10)], kept)
    finally:
        dist.destroy_process_group()
    assert run.stop.reason is None
    assert [samples.knows(index) for index in range(10)] == 6 * [True] + 4 * [False]
    assert all(whole.knows(index) for index in range(10))
    assert all(torch.equal(samples[i][kept.entry], whole[i][kept.entry]) for i in range(6))
    found = whole[9][kept.entry]
    if kind == "teacher":
        found = found[:, 5:10].contiguous().view(torch.float32)
    torch.testing.assert_close(found, expected(model, kind, ids[9]), check_dtype=False)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_the_samples_and_none_is_written_twice(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that divide matrices have the same samples, which one of them writes."""
    world = 2 * tp
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    own = [{"labels": torch.tensor([i])} for i in range(11)]
    plan, calls = plan_of("reference", world=world, tp=tp), []

    def rows(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch["labels"]))
        return batch["labels"].double()

    written = []
    for rank in range(world):
        run: Any = SimpleNamespace(
            plan=plan,
            sharded=SimpleNamespace(calls={}, stage=Stage()),
            **{"device": torch.device("cpu"), "rank": rank, "at": lambda phase: None},
            stop=Stop(lambda: None),
        )
        samples: Any = SimpleNamespace(
            samples=own, write=lambda ids, rows: written.extend(zip(ids, rows, strict=True))
        )
        kept = kept_of(plan.model)
        assert kept is not None
        kept = replace(kept, rows=rows)
        precompute.compute(run, nn.Identity(), Stage(), samples, [*range(11)], kept)
    assert calls == 2 * world * [3]  # as many on all ranks
    assert sorted(i for i, _ in written) == [*range(11)]
    assert all(row.item() == i for i, row in written)


@pytest.mark.parametrize(
    ("kind", "is_unknown"),
    [
        ("reference", lambda found: found.isnan().all() and found.shape == (4,)),
        ("teacher", lambda found: found.view(torch.float32).isnan().all()),
    ],
)
def test_what_is_not_known_has_no_loss_and_files_are_found_later(
    tmp_path: Path, kind: str, is_unknown: Callable[[Tensor], bool]
) -> None:
    own = [{"labels": torch.zeros(4, dtype=torch.int64)} for _ in range(3)]
    reader, writer = (opened(plan_of(kind), own, tmp_path) for _ in range(2))
    assert is_unknown(reader[1][reader.name])
    rows = torch.randint(9, (2, *reader[1][reader.name].shape)).to(reader[1][reader.name].dtype)
    writer.write([2, 0], [*rows])
    assert [reader.knows(index) for index in range(3)] == [True, False, True]
    assert torch.equal(reader[2][reader.name], rows[0])
    assert torch.equal(reader[0][reader.name], rows[1])
    assert [path.suffix for path in (tmp_path / "x").iterdir()] == [".safetensors"]
    other = WithPrecomputed(
        own,
        reader.name,
        reader.unknown,
        rundir=RunDir(tmp_path),
        folder=tmp_path / "x",
        split="validation",
    )
    assert not other.knows(0)


def test_what_is_kept_is_found_where_the_same_files_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    found = []
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        file = tmp_path / folder / "text.txt"
        file.parent.mkdir()
        file.write_text(f"a line of {text} text\n" * 90)
        data = DataPlan(
            source="path", paths=(str(file),), seq_len=8, tokenizer="bytes", shuffle=False,
            validation_fraction=0.1,
        )  # fmt: skip
        model = ModelPlan(target="mine:Model", objective=DPO())
        train = SimpleNamespace(seed=0, precision="fp32")
        plan: Any = SimpleNamespace(data=data, model=model, train=train)
        samples = precompute.with_precomputed([], plan, "train", RunDir(tmp_path))
        assert isinstance(samples, WithPrecomputed)
        found.append(samples.folder.name)
    assert found[0] == found[1] != found[2]
