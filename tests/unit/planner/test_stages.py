"""What models are sequences of blocks, how stages divide them, and what a stage leaves."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.cli.plan import describe
from colotrain.engine.build.sequence import find_sequence
from colotrain.engine.pipeline.stage import keep_stage_
from colotrain.errors import ColotrainError, ConfigError
from colotrain.events.view import RankView, RunView, stages
from colotrain.models.llm import LLM
from colotrain.runs.resolving import ResolvedConfig, resolve_config
from colotrain.spec.axes import SAMPLES, STAGE, MeshPlan, Ranks
from colotrain.spec.pipeline_schedule import bubble, pipeline_time
from colotrain.spec.plan import RunPlan
from colotrain.spec.resizing import resize
from colotrain.spec.sequence import BlockSequence, Costs, balance

IDS = torch.zeros(2, 6, dtype=torch.int64)


def llm(**args: Any) -> LLM:
    with torch.device("meta"):
        return LLM(vocab_size=16, d_model=8, num_layers=3, num_heads=2, **args)


def test_an_llm_is_a_sequence_and_a_tied_embedding_is_at_both_ends() -> None:
    found = find_sequence(llm(tie_embeddings=True), {"input_ids": IDS, "labels": IDS})
    assert found.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert found.before == ("embed.weight",)
    assert found.after == ("norm.weight", "embed.weight")
    assert found.stages_of("embed.weight", (2, 1)) == (0, 1)
    assert found.stages_of("norm.weight", (2, 1)) == (1,)
    assert found.stages_of("blocks.1.mlp.up.weight", (2, 1)) == (0,)


class Told(nn.Linear):
    """A layer that is given more than the activations."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + more


class Layers(nn.Module):
    """Layers in a row, or with one of the ways in which a model is no sequence of them."""

    def __init__(self, way: str = "", num: int = 3) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(16, 8)
        kind = Told if way == "tells layers" else nn.Linear
        self.layers = nn.ModuleList(kind(8, 8) for _ in range(num))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 16)
        if way == "keeps buffers":
            self.layers[1].register_buffer("seen", torch.zeros(()))
        if way == "normalizes":
            self.head = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), self.head)
        if way == "scores a norm":
            self.embed = nn.Sequential(self.embed, nn.Linear(8, 8))

    def forward(self, input_ids: Tensor) -> Any:
        x = first = self.embed(input_ids)
        if self.way == "skips unseen":
            first = first.detach()
        if self.way == "skips in place":
            first = torch.zeros_like(first).copy_(first.data)
        if self.way == "hides":
            first = torch.rand(first.shape)
        if self.way == "adds an input":
            first = input_ids[..., None]
        if self.way == "scales before":
            x = x * self.scale
        if self.way == "chances":
            x = x * torch.rand(1, device="cpu").item()
        for index, layer in enumerate(self.layers):
            if self.way == "drops" and index and random.random() < 1e-4:
                continue
            before, x = x, layer(x) if self.way != "tells layers" else layer(x, first.detach())
            if self.way == "adds between":
                x = x + before
            if self.way == "scales between" and index == 0:
                x = x * self.scale
            if self.way == "repeats" and index == 1:
                x = layer(x)
        beside = (
            "skips",
            "skips unseen",
            "skips in place",
            "hides",
            "adds an input",
            "in an object",
        )
        loss = self.head(x + first if self.way in beside else x).sum()
        if self.way == "scores a norm":
            loss = loss + self.embed[1].weight.detach().norm()
        if self.way == "scores a layer":
            loss = loss + self.layers[0].weight.detach().norm()
        return SimpleNamespace(loss=loss) if self.way == "in an object" else loss


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("skips", "what embed.weight gives reaches the loss beside the blocks"),
        ("adds between", "layers.1 does not take what layers.0 returned"),
        ("scales between", "scale, which belongs to no block, is used within or between blocks"),
        (
            "scales before",
            "scale belongs to no module that runs before the first block: move it into one",
        ),
        ("skips unseen", "what embed.weight gives reaches the loss beside the blocks"),
        ("in an object", "what embed.weight gives reaches the loss beside the blocks"),
        ("skips in place", "what embed.weight gives reaches the loss beside the blocks"),
        ("hides", "what a random number gives reaches the loss beside the blocks"),
        (
            "tells layers",
            "layers.1 takes what embed.weight gives beside what the block before gives",
        ),
        ("scores a layer", "what layers.0.weight gives reaches the loss beside the blocks"),
        ("scores a norm", "embed.1.weight is used before the blocks and in the loss"),
        ("drops", "random numbers are drawn on the host between layers.0 and layers.1"),
        ("chances", "random numbers are drawn on the host before layers.0"),
        ("normalizes", "it has buffers that checkpoints keep (head.1.running_mean)"),
        ("repeats", "layers.1 is called more than once"),
        ("keeps buffers", "it has buffers that checkpoints keep (layers.1.seen)"),
    ],
)
def test_a_model_that_is_no_sequence_is_told_why(way: str, why: str) -> None:
    assert find_sequence(Layers(), {"input_ids": IDS}).against == ""
    assert find_sequence(Layers("adds an input"), {"input_ids": IDS}).against == ""
    assert find_sequence(Layers(way), {"input_ids": IDS}).against == why


@pytest.mark.parametrize("index", [0, 1, 2])
def test_parameters_of_other_stages_have_no_memory_and_names_do_not_change(index: int) -> None:
    model = Layers()
    names = [name for name, _ in model.named_parameters()]
    sequence = find_sequence(model, {"input_ids": IDS})
    stage = keep_stage_(model, sequence, (1, 1, 1), index, compute_dtype=None)
    assert [name for name, _ in model.named_parameters()] == names
    held = {name for name, p in model.named_parameters() if not p.is_meta}
    ends = {0: {"embed.weight", "scale"}, 1: set(), 2: {"head.weight", "head.bias"}}
    assert held == {f"layers.{index}.weight", f"layers.{index}.bias", *ends[index]}
    assert [action.is_forward for action in stage.order(4)].index(False) == 3 - index


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_with_chunks_has_blocks_between_those_of_others(index: int) -> None:
    model = Layers(num=6)
    sequence = find_sequence(model, {"input_ids": IDS})
    stage = keep_stage_(model, sequence, (2, 1, 1, 2), index, chunks=2, compute_dtype=None)
    own = [stage.blocks_of(0), stage.blocks_of(1)]
    assert (
        own
        == [
            [("layers.0", "layers.1"), ("layers.3",)],
            [("layers.2",), ("layers.4", "layers.5")],
        ][index]
    )
    held = {name for name, p in model.named_parameters() if not p.is_meta}
    ends = [{"embed.weight", "scale"}, {"head.weight", "head.bias"}][index]
    blocks = {f"{block}.{kind}" for each in own for block in each for kind in ("weight", "bias")}
    assert held == blocks | ends
    parts = ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5"]
    names = ["embed", *parts, "head"]
    groups = stage.own_groups(model, [("embed", [model.get_submodule(name) for name in names])])
    kept = [[name for name in names if model.get_submodule(name) in own] for _, own in groups]
    assert (
        kept
        == [
            [["embed"], ["layers.0", "layers.1"], ["layers.3"]],
            [["layers.2"], ["layers.4", "layers.5"], ["head"]],
        ][index]
    )
    assert [stage.chunk_of(each[0]) for each in kept] == [[0, 0, 1], [0, 1, 1]][index]
    assert [stage.place_of(name, index) for name in ("layers.0", "layers.4")] == [
        [0, 0],
        [3, 3],
    ][index]


def test_a_split_is_as_good_as_any() -> None:
    rng = random.Random(3)
    for _ in range(60):
        costs = Costs(
            blocks=tuple(rng.randrange(1, 9) for _ in range(rng.randrange(2, 8))),
            after=rng.randrange(0, 20),
        )
        stages = rng.randrange(1, len(costs.blocks) + 1)

        def slowest(split: tuple[int, ...], costs: Costs = costs) -> int:
            rest, each = list(costs.blocks), []
            for count in split:
                each.append(sum(rest[:count]))
                del rest[:count]
            return max((*each[:-1], each[-1] + costs.after))

        sizes = range(1, len(costs.blocks) + 1)
        every = [
            split
            for split in itertools.product(sizes, repeat=stages)
            if sum(split) == len(costs.blocks)
        ]
        assert slowest(balance(costs, stages)) == min(map(slowest, every))
    assert balance(Costs(blocks=(4, 4, 4, 4), after=9), 2) == (3, 1)
    assert bubble(4, 12) == pytest.approx(0.2)


def test_ranks_of_a_stage_follow_one_another_and_stages_read_the_same_samples() -> None:
    ranks = Ranks.of(MeshPlan(pp=2, tp=2), world=8)
    assert [ranks.reader(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert ranks.groups(*STAGE) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ranks.groups(*SAMPLES) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert BlockSequence().stages_of("unused", (1, 1)) == (0,)


def played(costs: list[float], num: int) -> float:
    """Each stage works on the oldest backward it may, or else on a forward, as messages arrive."""
    count = len(costs)
    arrived = [[set(range(num)) if stage == 0 else set(), set()] for stage in range(count)]
    done, idle, ended = [[0, 0] for _ in costs], set(range(count)), 0.0
    events: list[tuple[float, int, int, int]] = []
    now = 0.0
    while True:
        for stage in [*idle]:
            forwards, backwards = done[stage]
            is_full = forwards - backwards > count - 1 - stage
            turn = 1 if is_full or forwards == num else 0
            if done[stage][turn] < num and done[stage][turn] in arrived[stage][turn]:
                idle.remove(stage)
                seconds = costs[stage] * (2 / 3 if turn else 1 / 3)
                heapq.heappush(events, (now + seconds, stage, turn, done[stage][turn]))
        if not events:
            return ended
        now, stage, turn, index = heapq.heappop(events)
        ended, done[stage][turn] = now, index + 1
        idle.add(stage)
        if turn == 0 and stage < count - 1:
            arrived[stage + 1][0].add(index)
        if turn == 0 and stage == count - 1:
            arrived[stage][1].add(index)
        if turn == 1 and stage:
            arrived[stage - 1][1].add(index)


def test_the_time_of_a_step_is_that_of_its_schedule() -> None:
    rng = random.Random(5)
    for _ in range(100):
        costs = [rng.uniform(0.2, 1.0) for _ in range(rng.randrange(1, 6))]
        num = rng.randrange(1, 30)
        each = [[cost] for cost in costs]
        assert pipeline_time(each, num) == pytest.approx(played(costs, num), rel=0.02)
    for chunks in (1, 2, 3):
        step_s = pipeline_time([[0.3] * chunks] * 4, 12)
        assert step_s == pytest.approx((12 * chunks + 3) * 0.3)
        assert 1 - 12 * chunks * 0.3 / step_s == pytest.approx(bubble(4, 12, chunks))


STAGED = ["recipe=llm-tiny", "plugin=zero1", "cluster.procs_per_node=2", "mesh.pp=2"]


def planned(*words: str) -> dict[str, Any]:
    sizes = ["train.global_batch=8", "train.micro_batch=2", "data.seq_len=64", "freeze.patterns=[]"]
    return describe(resolve_config([*STAGED, *sizes, *words], here=True, job=None))


def test_a_plan_counts_what_stages_send_and_how_long_they_wait() -> None:
    document = planned("model.args.d_model=64", "mesh.pp_split=[3,1]")
    micro_batch = 2 * 64 * 64 * 4
    assert document["pipeline"]["sent_bytes"] == [4 * micro_batch] * 2
    assert document["communication"]["bytes_per_step"] == 4 * micro_batch
    first, last = document["pipeline"]["waits"]
    assert 0 < first < last < 1
    assert document["alternatives"]
    for option in document["alternatives"]:
        assert option["time"]["waits"][0] < option["time"]["waits"][1]
    half = planned("train.precision=bf16", "model.args.d_model=64", "mesh.pp_split=[3,1]")
    assert half["pipeline"]["sent_bytes"] == [4 * micro_batch // 2] * 2


def on_gpus(*words: str) -> ResolvedConfig:
    """A plan under which the last stage is the fullest with whole parameters, else the first."""
    model = {"d_model": 1024, "num_heads": 8, "d_hidden": 4096, "num_layers": 5}
    sizes = ["recipe=llm-tiny", "hardware=a100-80g", "cluster.procs_per_node=8", "mesh.pp=2"]
    sizes += ["mesh.pp_split=[2,3]", "train.global_batch=64", "data.seq_len=512"]
    sizes += ["train.micro_batch=2", *(f"model.args.{key}={n}" for key, n in model.items())]
    return resolve_config([*sizes, *words], here=False, job=None)


def test_alternatives_need_the_memory_of_their_own_fullest_stage() -> None:
    fullest = set()
    alternatives = describe(on_gpus("plugin=zero1"))["alternatives"]
    assert len(alternatives) >= 3
    for option in alternatives:
        axes = (f"mesh.tp={option['tensor_parallel']}", f"mesh.cp={option['context_parallel']}")
        own = on_gpus(f"plugin={option['plugin']}", *axes)
        assert option["memory"]["peak"] == own.plan.memory.total
        fullest.add(own.context.stage.number)
    assert fullest == {0, 1}


def test_auto_takes_what_every_stage_has_room_for() -> None:
    names = ("zero1", "zero2", "zero3")
    highest = [on_gpus(f"plugin={name}").plan.peak.high for name in names]
    first, second, third = sorted(highest)
    taken = set()
    for room in (first, (first + second) // 2, second, (second + third) // 2, third, 2 * third):
        chosen = on_gpus("plugin=auto", f"cluster.memory={room}").plan
        need = on_gpus(f"plugin={chosen.plugin.name}").plan.peak
        assert chosen.peak.verdict(room) == need.verdict(room) == "yes"
        taken.add(chosen.plugin.name)
    assert len(taken) > 1


def test_stages_whose_parameters_are_frozen_get_no_gradients() -> None:
    document = planned("freeze.patterns=[embed*,blocks.0.*,blocks.1.*]", "mesh.pp_split=[2,2]")
    first, last = document["pipeline"]["sent_bytes"]
    assert first > 0
    assert last == 0


def test_measured_waits_of_stages_are_beside_planned_ones() -> None:
    plan = resolve_config([*STAGED, "mesh.pp_split=[3,1]"], here=True, job=None).plan
    about = {"step": 2, "t": 0.0, "rss": 1, "busy_s": 1.0, "data_s": 0.0, "wait_s": 0.5}
    ranks = [
        RankView(rank=rank, peak=rank, wait_share=share, **about)  # type: ignore[arg-type]
        for rank, share in enumerate((0.1, 0.2, 0.5, None))
    ]
    view = RunView(world_size=4, ranks=tuple(ranks), peak_by_rank=(7, 9, 5, 4))
    first, last = stages(view, plan)
    assert (first.place, first.peak) == ("ranks 0-1, blocks 0-2", 9)
    chunks = ["mesh.pp_schedule=interleaved", "mesh.pp_split=[1,1,1,1]"]
    interleaved = resolve_config([*STAGED, *chunks], here=True, job=None).plan
    assert [s.place for s in stages(view, interleaved)] == [
        "ranks 0-1, blocks 0, 2",
        "ranks 2-3, blocks 1, 3",
    ]
    assert (last.place, last.peak) == ("ranks 2-3, block 3", 5)
    assert first.wait == pytest.approx(0.15)
    assert last.wait == 0.5
    assert (first.planned_wait, last.planned_wait) == plan.time.waits
    assert stages(view, resolve_config(STAGED[:3], here=True, job=None).plan) == ()
    for strange in (10**12, 1):  # as an event of somebody else's may say
        assert len(stages(replace(view, world_size=strange), plan)) == (2 if strange > 1 else 0)


SIZES = ("recipe=llm-tiny", "train.global_batch=48", "train.micro_batch=2")


def on_nodes(nodes: int, procs: int | str, *more: str, **mesh: int) -> RunPlan:
    size = (f"cluster.nodes={nodes}", f"cluster.procs_per_node={procs}")
    axes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    return resolve_config([*SIZES, *size, *axes, *more], here=False, job=None).plan


@pytest.mark.parametrize(
    ("nodes", "procs", "mesh", "groups"),
    [
        (2, 1, {"pp": 2}, 1),
        (2, 2, {"pp": 4}, 1),
        (2, 2, {"pp": 2, "tp": 2}, 1),
        (4, 2, {"pp": 2, "cp": 2}, 2),
        (3, 2, {"pp": 2}, 3),
    ],
)
def test_stages_may_be_on_several_nodes(
    nodes: int, procs: int, mesh: dict[str, int], groups: int
) -> None:
    found = on_nodes(nodes, procs, **mesh)
    assert (found.world_size, found.batch.data_parallel) == (nodes * procs, groups)
    assert found.batch.accumulation_steps * groups * 2 == 48


@pytest.mark.parametrize(
    ("nodes", "procs", "mesh", "says"),
    [
        (2, 1, {"tp": 2}, "mesh.tp=2: expected a divisor of cluster.procs_per_node=1; one of 1"),
        (2, 1, {"tp": 2, "pp": 2}, "mesh.tp=2: expected a divisor of cluster.procs_per_node=1"),
        (2, 2, {"pp": 3}, "mesh.pp=3: expected a divisor of 4, the ranks of 2 nodes; one of 1, 2"),
        (
            2,
            2,
            {"pp": 4, "cp": 2},
            "mesh.pp × mesh.cp=4 × 2: expected a divisor of 4, the ranks of 2",
        ),
        (2, "auto", {"pp": 512}, "mesh.pp=512: expected what 2 nodes of at most "),
    ],
)
def test_groups_that_the_ranks_cannot_be_divided_into_are_refused(
    nodes: int, procs: int | str, mesh: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        on_nodes(nodes, procs, **mesh)
    (line,) = error.value.lines()
    assert says in line


def test_numbers_of_nodes_that_stages_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        on_nodes(4, 1, "elastic.min_nodes=2", pp=2)
    (line,) = error.value.lines()
    assert "which it is not for 3 (reachable: 2, 4)" in line
    four = on_nodes(4, 1, pp=2)
    assert resize(four, 2).batch.accumulation_steps == 2 * four.batch.accumulation_steps
    with pytest.raises(ColotrainError, match=r"3 nodes: .* cannot be shared out among 3 ranks"):
        resize(four, 3)


INTERLEAVED = ("mesh.pp_schedule=interleaved", "model.args.num_layers=8", "data.seq_len=64")


def test_chunks_shorten_the_wait_and_pass_on_more() -> None:
    usual, chunked = planned(INTERLEAVED[1]), planned(*INTERLEAVED[:2], "mesh.pp_chunks=4")
    assert chunked["pipeline"]["chunks"] == [[1] * 4] * 2
    assert chunked["pipeline"]["blocks"] == [4, 4]
    assert chunked["pipeline"]["bubble"] == pytest.approx(1 / 17)
    assert usual["pipeline"]["bubble"] == pytest.approx(1 / 5)
    assert max(chunked["pipeline"]["waits"]) < max(usual["pipeline"]["waits"])
    sent = usual["pipeline"]["sent_bytes"][0]
    assert chunked["pipeline"]["sent_bytes"] == [7 * sent] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("mesh.pp_chunks=2",),
            "mesh.pp_chunks=2: expected null or 1 with mesh.pp_schedule=1f1b",
        ),
        (
            (*INTERLEAVED, "mesh.pp_chunks=1"),
            "mesh.pp_chunks=1: expected 2 or more under mesh.pp_schedule=interleaved",
        ),
        (
            (*INTERLEAVED, "mesh.pp_chunks=5"),
            "mesh.pp_chunks=5: expected at most 4, as 2 stages share out 8 blocks",
        ),
        (
            (*INTERLEAVED, "mesh.pp_split=[4,4]"),
            "mesh.pp_split=[4, 4]: expected 4 numbers of 1 or more, whose sum is 8",
        ),
    ],
)
def test_chunks_that_cannot_be_are_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config([*STAGED, *words], here=True, job=None)
    assert says in str(caught.value)
