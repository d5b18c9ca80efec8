"""What a plan says of its collectives, and what four ranks of the engine really send: equal."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.gradients.gradients import clear_, watch
from colotrain.engine.model.freezing import freeze_
from colotrain.engine.sharding.grouping import find_groups
from colotrain.engine.sharding.reduce_scatter import Gradients, Reduction
from colotrain.engine.sharding.sharded_model import materialise_, numel_of, shard_
from colotrain.engine.sharding.shared_parameters import share_parameters
from colotrain.engine.sharding.transport import SharedAllGather, install
from colotrain.models.loading import build
from colotrain.planner.communication import traffic
from colotrain.runs.resolving import resolve_config
from colotrain.spec.plan import RunPlan
from tests.dist.test_transport import run
from tests.representatives import selected

RANKS, STEPS = 4, 2
WORDS = (
    "recipe=llm-tiny",
    "model.args.vocab_size=258",  # none of these divides by the ranks: shards are padded
    "model.args.d_model=36",
    "model.args.num_layers=4",
    "model.args.num_heads=2",
    "model.args.d_hidden=50",
    "data.seq_len=16",
    "train.micro_batch=2",
    "train.global_batch=null",
    f"accumulate.steps={STEPS}",
    f"cluster.procs_per_node={RANKS}",
)
FROZEN = "freeze.patterns=[embed*,blocks.0.*,blocks.1.*]"
CASES = {
    "zero1": ["plugin=zero1"],
    "zero2": ["plugin=zero2"],
    "zero3": ["plugin=zero3"],
    "hybrid": ["plugin=fsdp-hybrid", "plugin.shard_size=2"],
    "gemini": ["plugin=gemini", "plugin.chunk_size=64KiB"],
    "gemini, blocks cut up": ["plugin=gemini", "plugin.chunk_size=16KiB"],
    "overridden": [
        "plugin=zero3",
        "plugin.overrides={blocks.1:{reshard:true},blocks:{reshard:false}}",
    ],
    "zero1, frozen": ["plugin=zero1", FROZEN],
    "zero3, frozen": ["plugin=zero3", FROZEN],
    "hybrid, frozen": ["plugin=fsdp-hybrid", "plugin.shard_size=2", FROZEN],
}


PRECISIONS = ("fp32", "bf16")
"""In fp32 ranks share parameters, and nothing is gathered."""
KEPT = {
    *((name, "bf16") for name in ("zero1", "zero2", "zero3", "hybrid", "gemini, blocks cut up")),
    *((name, "fp32") for name in ("zero2", "gemini", "zero3, frozen")),
}
"""Cases that `make test` has."""


class Counts:
    """Collectives of each kind, and the bytes that one rank of a ring sends in them."""

    def __init__(self) -> None:
        self.calls, self.sent = Counter[str](), Counter[str]()

    def add(self, kind: str, num_bytes: int, ranks: int, *, rounds: int = 1) -> None:
        self.calls[kind] += 1
        assert num_bytes * rounds * (ranks - 1) % ranks == 0
        self.sent[kind] += num_bytes * rounds * (ranks - 1) // ranks

    def clear(self) -> None:
        self.calls.clear()
        self.sent.clear()


def count(counts: Counts, patch: pytest.MonkeyPatch) -> None:
    """Count what goes through the transport, and what replicas exchange."""
    gather, reduce, all_reduce = SharedAllGather.__call__, Reduction.reduce, dist.all_reduce

    def gathering(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        assert output_tensor.nbytes == input_tensor.nbytes * group.size()
        counts.add("gathered", output_tensor.nbytes, group.size())
        return gather(self, output_tensor, input_tensor, group, async_op)

    def reducing(self: Reduction, gradients: Gradients) -> None:
        numel = sum(numel_of(gradient.param) for gradient in gradients.each) * self.size
        counts.add("reduced", numel * gradients.dtype.itemsize, self.size)
        reduce(self, gradients)

    def replicating(tensor: Tensor, *rest: Any, group: Any = None, **more: Any) -> Any:
        assert group is not None, "an all-reduce over all ranks in the middle of a step"
        counts.add("replicated", tensor.nbytes, group.size(), rounds=2)
        return all_reduce(tensor, *rest, group=group, **more)

    patch.setattr(SharedAllGather, "__call__", gathering)
    patch.setattr(Reduction, "reduce", reducing)
    patch.setattr(dist, "all_reduce", replicating)


def train(rank: int, plans: dict[str, str], out: str) -> None:
    """The third step of each plan; rank 0 writes down what was counted."""
    found = {}
    for name, text in plans.items():
        plan = RunPlan.from_json(text)
        tokens = torch.randint(0, 258, (plan.batch.micro_batch, plan.data.seq_len))
        batch = {"input_ids": tokens, "labels": tokens}
        model = build(plan.model, seed=0)
        frozen = freeze_(model, plan.freeze)
        groups = find_groups(
            model,
            chunk_bytes=plan.plugin.chunk_bytes,
            batch=batch,
            split=plan.plugin.split_blocks,
        )
        sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), groups, frozen=frozen)
        assert install(sharded) is not None
        shared_params = share_parameters(sharded)
        assert (shared_params is None) == (plan.train.precision == "bf16")
        allocate = {"allocate": shared_params.allocate} if shared_params else {}
        materialise_(sharded, device="cpu", seed=0, **allocate)
        state, counts = watch(sharded), Counts()
        with pytest.MonkeyPatch.context() as patch:
            count(counts, patch)
            for _ in range(3):
                counts.clear()
                clear_(model)
                totals = StepTotals(nominal=float(tokens.numel()))
                accumulate(state, [batch] * STEPS, num=STEPS, totals=totals)
        found[name] = {"calls": dict(counts.calls), "sent": dict(counts.sent)}
    if rank == 0:
        Path(out).write_text(json.dumps(found), "utf-8")


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[dict, dict]]:
    """Case → what the plan says, and what was counted."""
    folder = tmp_path_factory.mktemp("collectives")
    settings = {
        f"{name}, {precision}": resolve_config(
            [*WORDS, *CASES[name], f"train.precision={precision}"], here=False
        )
        for name, precision in sorted(selected(request, "name", "precision"))
    }
    out = folder / "counted.json"
    run(train, RANKS, {name: s.plan.to_json() for name, s in settings.items()}, str(out))
    counted, found = json.loads(out.read_text("utf-8")), {}
    for name, setting in settings.items():
        context = setting.context
        trace = context.stage.traces("none", setting.plan.batch.micro_batch)
        sent = traffic(context.layout(setting.plan.plugin), setting.survey, trace)
        hybrid = {"replicated": sent.replicated_bytes} if sent.replicated_bytes else {}
        said = {
            "calls": {"gathered": sent.gathers, "reduced": sent.reductions},
            "sent": {"gathered": sent.gathered_bytes, "reduced": sent.reduced_bytes, **hybrid},
            "bytes_per_step": sent.bytes_per_step,
        }
        found[name] = (said, counted[name])
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*case, marks=() if case in KEPT else pytest.mark.slow)
        for case in itertools.product(CASES, PRECISIONS)
    ],
)
def test_a_plan_counts_the_collectives_of_a_step_to_the_byte(
    name: str, precision: str, both: Any
) -> None:
    said, counted = both[f"{name}, {precision}"]
    sent = {kind: counted["sent"].get(kind, 0) for kind in said["sent"]}
    assert said["sent"] == sent
    assert (sent["gathered"] == 0) == (precision == "fp32")
    assert said["bytes_per_step"] == sum(counted["sent"].values())
    assert said["calls"] == {kind: counted["calls"].get(kind, 0) for kind in said["calls"]}
