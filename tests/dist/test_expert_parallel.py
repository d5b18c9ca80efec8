"""Ranks that divide experts, and send them their tokens, compute what one process computes."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from json import loads
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from colotrain.cli.main import guarded
from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.gradients.gradients import watch
from colotrain.engine.sharding import tensor_parallel
from colotrain.engine.sharding.expert_parallel import all_to_all, divide_experts_among_ranks_
from colotrain.engine.sharding.sharded_model import materialise_, shard_
from colotrain.engine.sharding.tensor_parallel import TensorGroup
from colotrain.models.expert_parallel import ExpertShard, expert_divisions, share_tokens_
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_
from colotrain.spec.axes import EP
from colotrain.spec.plan import ModelPlan, RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.torch_internals import hooks_of
from colotrain.verify import runner
from tests.dist import plain
from tests.dist.own_experts import CHOSEN, EXPERTS, WIDTH, Experts, OwnExperts, samples
from tests.dist.test_changed_axes import assert_equal_states
from tests.dist.test_run import losses
from tests.dist.test_transport import plan_of, run
from tests.families import FAMILIES
from tests.representatives import representatives
from tests.running import Colotrain

OWN = (
    *("model.target=tests.dist.own_experts:make", "data.target=tests.dist.own_experts:samples"),
    *("mesh.ep_plan=['blocks.*.experts']", "train.global_batch=8", "train.micro_batch=2"),
)
PLAN = ModelPlan(target="its:own", ep_plan=["experts"])
NAMES = {
    "Qwen3-MoE": "Qwen3MoeForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "GPT-OSS": "GptOssForCausalLM",
    "DeepSeek V3": "DeepseekV3ForCausalLM",
}


def verified(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    guarded(["verify", *OWN, *options, "--json"])
    cases: list[dict[str, Any]] = loads(capsys.readouterr().out)["cases"]
    return cases


@pytest.mark.parametrize("chosen", ["any", "first", "one"])
def test_experts_of_several_ranks_have_outputs_and_gradients_of_all_tokens(chosen: str) -> None:
    run(compare_with_all_tokens, 2, chosen)


def compare_with_all_tokens(rank: int, chosen: str) -> None:
    """Against each token's experts, written out; ranks have 5 and 8 tokens."""
    draw = torch.Generator().manual_seed(torch.initial_seed() % 1000 + 5)
    torch.manual_seed(11)
    model = nn.ModuleDict({"experts": Experts().double()})
    whole: Any = Experts().double()
    whole.load_state_dict(model["experts"].state_dict())
    like = {"dtype": torch.float64, "generator": draw}
    tokens = [torch.randn(n, WIDTH, **like).requires_grad_() for n in (5, 8)]
    gates = [torch.rand(n, CHOSEN, **like).requires_grad_() for n in (5, 8)]
    chances = [torch.rand(n, EXPERTS, **like) for n in (5, 8)]
    if chosen == "first":  # the second rank's experts get no token
        chances = [each - torch.arange(EXPERTS) for each in chances]
    index = [each.topk(CHOSEN).indices for each in chances]
    if chosen == "one":  # twice the same expert
        index = [each[:, :1].expand(-1, CHOSEN).contiguous() for each in index]
    weights = [torch.randn(n, WIDTH, **like) for n in (5, 8)]
    outputs = [written_out(whole, *each) for each in zip(tokens, index, gates, strict=True)]
    sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()  # type: ignore
    divisions = expert_divisions(model, PLAN)
    splits = divide_parameters_(model, divisions, TensorShard(rank=rank, size=2))
    assert len(splits) == 3
    shard = ExpertShard(rank=rank, size=2)
    share_tokens_(model, divisions, shard)
    shard.all_to_all = partial(all_to_all, group=dist.group.WORLD)
    own = [each[rank].detach().clone().requires_grad_() for each in (tokens, gates)]
    found = model["experts"](own[0], gates=own[1], index=index[rank])
    assert torch.allclose(found, outputs[rank], rtol=0, atol=1e-12)
    (found * weights[rank]).sum().backward()
    for mine, wanted in zip(own, (tokens, gates), strict=True):
        assert torch.allclose(mine.grad, wanted[rank].grad, rtol=0, atol=1e-12)
    for name, parameter in model["experts"].named_parameters():
        wanted_part = whole.get_parameter(name).grad.chunk(2)[rank]
        assert torch.allclose(parameter.grad, wanted_part, rtol=0, atol=1e-12), name


def written_out(experts: Any, tokens: Tensor, index: Tensor, gates: Tensor) -> Tensor:
    rows = []
    for token, chosen, own in zip(tokens, index.tolist(), gates, strict=True):
        each = [
            gate * (experts.down[e] @ F.gelu(experts.up[e] @ token + experts.up_bias[e]))
            for e, gate in zip(chosen, own, strict=True)
        ]
        rows.append(torch.stack(each).sum(0))
    return torch.stack(rows)


SUMMED = [(7, 3), (), (0, 4), (100,), (2, 2, 2), (33,), (1,)]
LARGEST = 12
"""Numbers of a bucket in float32; gradients of 100 and 33 are larger, also in bfloat16."""


def test_gradients_are_summed_in_buckets_with_the_bits_of_their_sums() -> None:
    run(compare_sums, 3)


def compare_sums(rank: int) -> None:
    """Against the gradients of all ranks, added in their order number by number."""
    dtypes = [*(torch.float32, torch.bfloat16) * 4][: len(SUMMED)]
    draw, sizes = torch.Generator().manual_seed(torch.initial_seed() % 1000), list[int]()
    of_ranks = [
        [torch.randn(s, generator=draw).to(d) for s, d in zip(SUMMED, dtypes, strict=True)]
        for _ in range(3)
    ]
    group = TensorGroup(shard=TensorShard(rank=rank, size=3))
    group.connect_(dist.group.WORLD, "cpu")
    sums = group.shard.reduce_scatter

    def noted(own: Tensor, parts: Tensor) -> None:
        sizes.append(parts.nbytes)
        sums(own, parts)

    group.shard.reduce_scatter = noted
    tensor_parallel.SUM_BYTES = 4 * LARGEST
    found = [gradient.clone() for gradient in of_ranks[rank]]
    found[0] = found[0].t().contiguous().t()
    group.sum_(found, "cpu")
    for gradient, *each in zip(found, *of_ranks, strict=True):
        assert torch.equal(gradient, each[0] + each[1] + each[2])
    num_bytes = [sum(g.nbytes for g in found if g.dtype == d) for d in (*dict.fromkeys(dtypes),)]
    assert len(sizes) == sum(-(-num // (4 * LARGEST)) for num in num_bytes)
    assert max(sizes) == 4 * LARGEST


def test_every_plugin_equals_one_process_when_two_ranks_divide_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("train.grad_clip=0.1", "--freeze", "none", "--steps", "2")
    cases = verified(capsys, "--world-sizes", "2", "--ep", "2", *options)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert {case["accumulation_steps"] for case in cases} == {1, 4}
    for case in cases:
        assert case["passed"], case["difference"]
        assert case["ep"] == 2, case
        assert case["max_abs_loss"] <= 1e-6
        assert case["max_abs_gradient"] <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        ("--ep", "2,4", "--optimizer", "recipe", "train.activation_checkpointing=full"),
        ("--ep", "2", "plugin.name=fsdp-hybrid", "plugin.shard_size=1", "--accumulation", "2"),
        ("--ep", "2", "adapter.name=lora", "adapter.targets=['*.mix','*.router']"),
        ("--ep", "2", "freeze.patterns=['blocks.0.experts.*',head.*]", "--accumulation", "2"),
    ],
    ids=["recomputed, adamw", "replicas", "adapters", "frozen"],
)
def test_every_plugin_equals_one_process_on_four_ranks(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = verified(capsys, "--world-sizes", "4", "--freeze", "none", *options)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.slow
def test_in_bf16_divided_experts_are_as_far_from_one_process_as_whole_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rounding changes which experts some tokens have, so that neither passes a verification."""
    options = ("--plugins", "zero2", "--accumulation", "4", "--freeze", "none")
    cases = verified(capsys, "--world-sizes", "4", "--ep", "1,4", *options, "train.precision=bf16")
    whole, divided = cases
    for key in ("max_abs_loss", "max_abs_gradient", "max_abs_parameter"):
        assert divided[key] == pytest.approx(whole[key], rel=0.2), key


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        ("sends_a_token_twice", "loss of step"),
        ("leaves_out_gates", "loss of step"),
        ("averages_experts", "experts."),
        ("leaves_norms_partial", "gradient of"),
    ],
)
def test_a_fault_in_dividing_experts_is_found(
    mutant: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    options = ("--plugins", "zero3", "--accumulation", "1", "--steps", "2", "--freeze", "none")
    (case,) = verified(capsys, "--world-sizes", "2", "--ep", "2", *options)
    assert not case["passed"]
    assert says in case["difference"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", representatives(list(NAMES), kept=list(NAMES)))
def test_mixtures_of_transformers_train_as_plain_transformers(
    name: str, ranks: int, ep: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (family,) = (each for each in FAMILIES if each.architecture == NAMES[name])
    folder = family.make(tmp_path / "made")
    sizes = (f"cluster.procs_per_node={ranks}", f"mesh.ep={ep}", "train.micro_batch=1")
    plans = [plain.plan_of(family, folder, plugin, *sizes) for plugin in ROWS]
    for result in plain.compare(family, folder, tmp_path / "cases", plans):
        assert result.passed, f"{result.plugin}: {result.difference}"
        assert result.max_abs_loss <= 1e-6
    run_of = runner.case_of(tmp_path / "cases", ranks, 0)
    to = tmp_path / "exported"
    assert plain.export_difference(family, folder, run_of, to, step=plain.STEPS) <= 1e-5


class Hooked(OwnExperts):
    """Hooks that are no linear functions of a gradient, of a matrix and of a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        for parameter in (self.head.weight, self.scale):
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * self.scale, labels)


def test_a_hook_sees_what_it_sees_under_ddp() -> None:
    run(clamp_as_under_ddp, 2, plan_of("zero2", 2, "mesh.ep=2", "~model.args", *OWN))


def clamp_as_under_ddp(rank: int, plan: RunPlan) -> None:
    torch.manual_seed(7)
    model = Hooked()
    replica = DistributedDataParallel(deepcopy(model))
    for (name, own), there in zip(model.named_parameters(), replica.parameters(), strict=True):
        if name in ("head.weight", "scale"):
            for hook in hooks_of(own).values():
                there.register_hook(hook)
    batch = {k: torch.stack([sample[k] for sample in samples()[rank::2][:4]]) for k in samples()[0]}
    loss, count = replica(**batch)
    (loss / count).backward()
    comms = Groups(plan.ranks, "cpu")
    tensor = divide_experts_among_ranks_(model, plan, comms)
    sharded = shard_(model, plan, comms, [], tensor=tensor)
    tensor.connect_(comms[EP], "cpu")
    materialise_(sharded, device="cpu", seed=0)
    accumulate(watch(sharded), [batch], num=1, totals=StepTotals(nominal=2.0 * count.item()))
    for name, own in sharded.module.named_parameters():
        if name not in tensor.splits:
            found = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
            wanted = replica.module.get_parameter(name).grad
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7, msg=name)


def test_a_run_goes_on_with_and_without_divided_experts(colotrain: Colotrain) -> None:
    options = (
        *(*OWN[:2], *OWN[3:], "cluster.procs_per_node=2", "train.eval_steps=0"),
        *("checkpoint.every=1", "checkpoint.keep=4", "train.on_nonfinite=rollback"),
    )
    divided = (OWN[2], "mesh.ep=2")
    whole = colotrain.run(*options, "train.max_steps=3", "plugin=zero1", "name=whole")
    first = colotrain.run(*options, *divided, "train.max_steps=1", "plugin=zero3", "name=first")
    assert losses(first) == pytest.approx(losses(whole)[:1], abs=1e-6)
    saved = colotrain.rundir("first").checkpoint(1)
    again = (*options, "train.max_steps=3", "plugin=gemini", f"checkpoint.resume={saved}")
    assert losses(colotrain.run(*again, "name=a")) == pytest.approx(losses(whole)[1:], abs=1e-6)
    saved = colotrain.rundir("a").checkpoint(2)
    back = (*options, *divided, "plugin=zero2", "train.max_steps=3", f"checkpoint.resume={saved}")
    assert losses(colotrain.run(*back, "name=b")) == pytest.approx(losses(whole)[2:], abs=1e-6)
    assert_equal_states(saved, colotrain.rundir("b").checkpoint(2))
    resumed = colotrain("resume", "first", "train.max_steps=3", "--json")
    straight = colotrain.run(*options, *divided, "train.max_steps=3", "plugin=zero3", "name=c")
    assert losses(resumed.json) == losses(straight)
    assert_equal_states(*(colotrain.rundir(name).checkpoint(3) for name in ("first", "c")))


LIST = """
from torch import nn
from tests.dist.own_experts import Experts, OwnExperts

class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(OwnExperts().blocks[0].experts.up.detach())
    def forward(self, hidden):
        return hidden

class Reordered(Experts):
    def forward(self, tokens, gates, index):
        return super().forward(tokens, index, gates)

class Dense(Experts):
    def forward(self, tokens, index, gates):
        return super().forward(tokens, index, gates.gather(1, index))

def called(experts, order):
    model = OwnExperts()
    block = model.blocks[0]
    block.experts = experts()
    def forward(x):
        normed = block.norm(x)
        chances = block.router(normed).softmax(-1)
        gates, index = chances.topk(2)
        given = {"tokens": normed, "index": index, "gates": gates, "all": chances}
        out = block.experts(*(given[key].flatten(0, 1) for key in order))
        return x + out.view(x.shape), chances.mean(1).square().sum(-1)
    block.forward = forward
    return model

def reordered():
    return called(Reordered, ("tokens", "gates", "index"))

def dense():
    return called(Dense, ("tokens", "index", "all"))

def without_gates():
    return called(Experts, ("tokens", "index"))

def hooked():
    model = OwnExperts()
    model.blocks[1].experts.up.register_hook(lambda grad: grad.clamp(-1, 1))
    return model

def in_list():
    model = OwnExperts()
    model.blocks[1].experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    return model

def unknown():
    model = OwnExperts()
    model.blocks[1].experts = Stacks()
    return model
"""


def test_what_cannot_be_divided_is_refused_by_name(colotrain: Colotrain) -> None:
    (colotrain.cwd / "of_lists.py").write_text(LIST)
    own, data, two = OWN[0], OWN[1], ("cluster.procs_per_node=12", "train.global_batch=24")
    for words, says in {
        (own, "mesh.ep=2"): "no experts in one parameter",
        ("model.target=of_lists:in_list", "mesh.ep=2"): "blocks.1.experts is a list of modules",
        ("model.target=of_lists:unknown", "mesh.ep=2"): "blocks.1.experts takes (hidden)",
        ("model.target=of_lists:hooked", OWN[2], "mesh.ep=2"): "a hook of blocks.1.experts.up",
        ("model.target=of_lists:reordered", OWN[2], "mesh.ep=2"): (
            "mesh.ep: blocks.0.experts cannot exchange tokens: it gets tokens [12, 16] of "
            "torch.float32, gates [12, 2] of torch.float32, index [12, 2] of torch.int64, not"
        ),
        ("model.target=of_lists:dense", OWN[2], "mesh.ep=2"): "gates [12, 4] of torch.float32",
        ("model.target=of_lists:without_gates", OWN[2], "mesh.ep=2"): "argument: 'gates', not",
        (own, OWN[2], "mesh.ep=3"): "a divisor of num_experts=4",
        (own, OWN[2], "mesh.ep=5"): "a divisor of cluster.procs_per_node=12",
        (own, "mesh.ep=2", "mesh.ep_plan=['blocks.*.expert']"): "the names of modules of experts",
        (own, "mesh.ep=2", "mesh.ep_plan=['blocks.*']"): "blocks.0 has modules with parameters",
        (own, "mesh.ep=2", "mesh.ep_plan=['*norm','*.experts']"): "blocks.0.norm takes (input)",
        (own, OWN[2], "mesh.ep=2", "mesh.cp=2"): "mesh.ep=2",
        (own, OWN[2], "mesh.ep=2", "train.compile=true"): "train.compile",
    }.items():
        found = colotrain("plan", *words, data, *two, "plugin=zero2")
        assert found.code == 2, words
        assert says in " ".join(found.err.split()), (words, found.err)
