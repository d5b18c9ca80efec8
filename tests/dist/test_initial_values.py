"""Initial values: plain torch's, or those of `init_weights()`, the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain.engine.comms.groups import Groups
from colotrain.engine.parts.part_map import local_part, rows_of
from colotrain.engine.sharding.sharded_model import materialise_, shard_
from colotrain.engine.sharding.shared_parameters import share_parameters
from colotrain.errors import ColotrainError
from colotrain.models import filling
from colotrain.models.loading import (
    WHOLE,
    allocate_,
    begin_training_,
    build,
    build_on_meta,
    build_whole,
    initialise_,
)
from colotrain.planner.traced.survey import UNCALLED, survey
from colotrain.spec.plan import FreezePlan, ModelPlan, RunPlan
from colotrain.verify.plain_models import build_plain
from tests.dist import hf
from tests.dist.test_transport import plan_of, run
from tests.representatives import representatives

init = nn.init
PADDING = 2
FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "uniform_": init.uniform_,
    "normal_": init.normal_,
    "trunc_normal_": init.trunc_normal_,
    "constant_": lambda w: init.constant_(w, 0.3),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "eye_": init.eye_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_normal_": init.kaiming_normal_,
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda w: init.sparse_(w, sparsity=0.5),
    "dirac_": lambda w: init.dirac_(w.view(*w.shape, 1)),
    "padding": lambda w: w.data[PADDING].zero_(),
    "second half": lambda w: init.normal_(w[:, w.shape[1] // 2 :]),
    "first half": lambda w: init.normal_(w[: w.shape[0] // 2]),
    "one by one": lambda w: [init.normal_(row, std=0.1 * i) for i, row in enumerate(w)],
    "copied": lambda w: w.copy_(torch.randn(w.shape)),
    "data assigned": lambda w: setattr(w, "data", torch.rand(w.shape)),
    "diagonal": lambda w: w.fill_diagonal_(2.0),
    "scaled": lambda w: w.mul_(0.5),
    "numpy": lambda w: w.detach().numpy().fill(0.25),
    "list": lambda w: w.copy_(torch.tensor(w.tolist()).flip(0)),
    "looked at": lambda w: w.copy_(w / w.norm()),
    "exponential_": lambda w: w.data.exponential_(),
    "python": lambda w: w.data.fill_(float(torch.rand(()))),
}
"""Ways to initialise a weight of 7 × 6."""


def seeded() -> torch.Generator:
    """A generator of the user's own."""
    return torch.Generator().manual_seed(11)


WITH_ARGUMENTS: dict[str, Callable[[Tensor], object]] = {
    "uniform_ own": lambda w: init.uniform_(w, -2.0, 5.0, generator=seeded()),
    "normal_ own": lambda w: init.normal_(w, 1.0, 3.0, generator=seeded()),
    "trunc_normal_ own": lambda w: init.trunc_normal_(w, 0.5, 2, -1, 1, generator=seeded()),
    "xavier_uniform_ own": lambda w: init.xavier_uniform_(w, gain=5 / 3, generator=seeded()),
    "xavier_normal_ own": lambda w: init.xavier_normal_(w, gain=0.2, generator=seeded()),
    "kaiming_uniform_ own": lambda w: init.kaiming_uniform_(
        w, a=5**0.5, mode="fan_out", nonlinearity="leaky_relu", generator=seeded()
    ),
    "kaiming_normal_ own": lambda w: init.kaiming_normal_(
        w, mode="fan_out", nonlinearity="tanh", generator=seeded()
    ),
    "orthogonal_ own": lambda w: init.orthogonal_(w, gain=2.0, generator=seeded()),
    "dirac_ own": lambda w: init.dirac_(w.view(6, 7, 1), groups=2),
    "method own": lambda w: w.data.normal_(0.0, 2.0, generator=seeded()),
    "tensor own": lambda w: w.copy_(torch.randn(w.shape, generator=seeded())),
}
"""Arguments that are not the default ones, a generator among them: values are plain torch's."""
DRAWN_WITH_ARGUMENTS: dict[str, Callable[[Tensor], object]] = {
    "xavier_uniform_ gain": lambda w: init.xavier_uniform_(w, gain=init.calculate_gain("tanh")),
    "xavier_normal_ gain": lambda w: init.xavier_normal_(w, gain=3.0),
    "kaiming_uniform_ mode": lambda w: init.kaiming_uniform_(w, a=0.5, mode="fan_out"),
    "kaiming_normal_ mode": lambda w: init.kaiming_normal_(
        w, mode="fan_out", nonlinearity="linear"
    ),
    "orthogonal_ gain": lambda w: init.orthogonal_(w, gain=0.5),
    "sparse_ own": lambda w: init.sparse_(w, 0.3, std=2.0, generator=seeded()),  # places it draws
    "sparse_ std": lambda w: init.sparse_(w, sparsity=0.2, std=1.0),
    "trunc_normal_ bounds": lambda w: init.trunc_normal_(w, 1.0, 0.5, 0.0, 1.5),
}
FUNCTIONS |= WITH_ARGUMENTS | DRAWN_WITH_ARGUMENTS
AS_PLAIN = ("constant_", "ones_", "zeros_", "eye_", "dirac_", "numpy", *WITH_ARGUMENTS)


class Zoo(nn.Module):
    """Initialises each of its layers in another way, and some in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 7) for name in FUNCTIONS})
        self.embed = nn.Embedding(7, 6, padding_idx=PADDING)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.lstm, self.attention = nn.LSTM(6, 4), nn.MultiheadAttention(6, 2)
        self.transposed = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.narrow = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.numbers = nn.Parameter(torch.empty(5, dtype=torch.int64), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("kept", torch.arange(3.0))
        self.plain = torch.full((2,), 0.5)

    def init_weights(self) -> None:
        for module in self.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
        self.attention._reset_parameters()
        self.embed.reset_parameters()  # the layer that is tied to it was reset after it
        for name, function in FUNCTIONS.items():
            function(self.layers[name].weight)
        self.apply(self._init_norms)
        init.ones_(self.scale)
        init.trunc_normal_(self.narrow.weight)
        for name, parameter in self.named_parameters():
            if name == "numbers":
                parameter.random_(0, 100)
        self.transposed.weight.copy_(self.layers["normal_"].weight.t())

    @staticmethod
    def _init_norms(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.constant_(module.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x


ZOO = ModelPlan(target=f"{__name__}:Zoo", deferred_init=True)


def equals_one_process(rank: int, *plans: RunPlan) -> None:
    for kept_bytes in (0, 16 << 20):
        filling.KEPT_BYTES = kept_bytes  # with 0 all but the operation's own is read again
        whole = build_whole(ZOO, seed=5)
        for plan in plans:
            model = build(ZOO, seed=5)
            assert all(parameter.is_meta for parameter in model.parameters())
            for module in (model.narrow, model.numbers):
                module.requires_grad_(False)
            sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), [])
            shared_params = share_parameters(sharded)
            allocate = shared_params.allocate if shared_params is not None else lambda fresh: None
            object.__setattr__(sharded, "source", ZOO)
            materialise_(sharded, device="cpu", seed=5, allocate=allocate)
            equal_rows(whole, model)


def equal_rows(whole: nn.Module, sharded: nn.Module) -> None:
    wanted = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found = {**dict(sharded.named_parameters()), **dict(sharded.named_buffers())}
    assert wanted.keys() == found.keys()
    for name, tensor in found.items():
        part = wanted[name]
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group("dp_shard")
            start, count = rows_of(tensor.shape[0], group.rank(), group.size())
            part = part[start : start + count]
        assert torch.equal(local_part(tensor.detach()), part), name


@pytest.mark.parametrize("num_ranks", representatives([1, 2, 3, 4], kept=[3]))
def test_initial_values_are_those_of_one_process(num_ranks: int) -> None:
    plugins = ["zero1", "zero2", "zero3", "gemini"]
    plans = [plan_of(plugin, num_ranks) for plugin in plugins]
    plans.append(plan_of("fsdp-hybrid", num_ranks, f"plugin.shard_size={max(num_ranks // 2, 1)}"))
    run(equals_one_process, num_ranks, *plans)


def test_initial_values_are_what_plain_torch_makes_of_them() -> None:
    model = build_whole(ZOO, seed=5)
    plain = Zoo()
    with torch.no_grad():
        plain.init_weights()
    weights = {name: layer.weight.detach() for name, layer in model.layers.items()}
    for name in AS_PLAIN:
        assert torch.equal(weights[name], plain.layers[name].weight), name
    for name, weight in weights.items():
        bound = 1 / math.sqrt(6)  # of nn.Linear's default
        assert not weight.isnan().any()
        if name != "python":  # one number, small or large
            within = plain.layers[name].weight.abs() <= bound
            assert (weight.abs() <= bound).all() == within.all(), name
        assert torch.equal(model.layers[name].bias, plain.layers[name].bias)
    assert not weights["padding"][PADDING].any()
    assert weights["padding"][PADDING + 1].any()
    assert not torch.equal(weights["uniform_"], weights["normal_"])
    orthogonal = weights["orthogonal_"]
    torch.testing.assert_close(orthogonal.T @ orthogonal, torch.eye(6), atol=1e-5, rtol=0)
    assert (weights["sparse_"] == 0).sum(0).tolist() == [4] * 6
    assert weights["first half"][:3].abs().max() > bound > weights["first half"][3:].abs().max()
    assert weights["scaled"].abs().max() < bound / 2
    assert weights["diagonal"].diagonal().tolist() == [2.0] * 6
    torch.testing.assert_close(weights["looked at"].norm(), torch.tensor(1.0))
    assert torch.equal(model.transposed.weight, weights["normal_"].t())
    assert not model.embed.weight[PADDING].any()
    assert model.tied.weight is model.embed.weight
    assert torch.equal(model.plain, plain.plain)
    assert not model.attention.in_proj_bias.any()
    assert model.lstm(torch.ones(2, 6))[0].isfinite().all()


def test_another_seed_gives_other_values_and_the_same_seed_the_same() -> None:
    first, second, other = (build_whole(ZOO, seed=seed) for seed in (5, 5, 6))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    for name in ("copied", "orthogonal_", "python", "normal_"):
        assert not torch.equal(first.layers[name].weight, other.layers[name].weight)


class Drawn(nn.Module):
    """Draws large weights, and reads what it has just drawn in several ways."""

    def __init__(self, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.layers = nn.ModuleList(nn.Linear(700, 800, bias=False) for _ in range(8))

    def init_weights(self) -> None:
        for layer in self.layers:
            init.normal_(layer.weight, std=self.std)
        scaled, again, turned, copied, seen, shared, looked, _ = (x.weight for x in self.layers)
        scaled.uniform_(-1, 1).mul_(3.0)
        again.normal_().normal_()
        turned.data.t().uniform_()
        copied.copy_(again)
        seen.detach().numpy()[3] = 0.5
        memory = shared.detach().numpy()
        shared.normal_()
        memory[:] = memory * 2
        looked.uniform_()
        looked.fill_(float(looked[-1, -1]))


@pytest.mark.parametrize("ahead_bytes", [0, 1 << 30])
def test_what_threads_draw_is_what_one_process_draws_in_turn(ahead_bytes: int) -> None:
    wanted = dict(build_plain(deferred("Drawn"), seed=5).named_parameters())
    model = build(deferred("Drawn"), seed=5)
    allocate_(model, device="cpu")
    initialise_(model, seed=5, shards=replace(WHOLE, ahead_bytes=ahead_bytes))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_an_error_of_a_draw_has_the_users_line() -> None:
    with pytest.raises(RuntimeError, match="std") as raised:
        build_whole(deferred("Drawn", std=-1.0), seed=5)
    lines = [str(entry.statement).strip() for entry in raised.traceback]
    assert "init.normal_(layer.weight, std=self.std)" in lines


def deferred(name: str, **args: object) -> ModelPlan:
    return ModelPlan(target=f"{__name__}:{name}", args=args, deferred_init=True)


class Odd(Zoo):
    """What cannot be had when the model is sharded already."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.bare = nn.Parameter(torch.ones(3))

    def init_weights(self) -> None:
        super().init_weights()
        if self.what == "ties":
            self.bare.fill_(1.0)
            self.layers["ones_"].weight = self.layers["normal_"].weight
        if self.what == "ties data":
            self.bare.fill_(1.0)
            self.layers["ones_"].weight.data = self.layers["normal_"].weight.data
        if self.what == "reshapes":
            self.bare.data = torch.ones(4)
        if self.what == "adds":
            self.bare.fill_(1.0)
            self.more = nn.Parameter(torch.ones(2))
        if self.what == "replaces":
            self.bare = nn.Parameter(torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("leaves", r"init_weights\(\) leaves bare unset \(1 in all\)"),
        ("ties", r"init_weights\(\) ties layers\.ones_\.weight to layers\.normal_\.weight"),
        ("ties data", r"init_weights\(\) ties layers\.ones_\.weight to layers\.normal_\.weight"),
        ("reshapes", r"init_weights\(\) replaces bare .* by torch.float32 \(4,\)"),
        ("adds", r"init_weights\(\) adds the parameter more"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(what: str, says: str) -> None:
    with pytest.raises(ColotrainError, match=says):
        build_whole(deferred("Odd", what=what), seed=0)


def test_a_parameter_that_is_replaced_by_one_like_it_has_its_value() -> None:
    model = build_whole(deferred("Odd", what="replaces"), seed=0)
    assert model.bare.tolist() == [2.0] * 3


class Edited(nn.Module):
    """Values set in every way, with an `init_weights()` that sets others."""

    def __init__(self, *, calls: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("noise", torch.randn(6))
        if calls:
            self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
        for parameter in self.inner.parameters():
            init.uniform_(parameter)
        init.normal_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) * self.scale + self.noise)


EDITS: dict[str, Callable[[Edited], object]] = {
    "constant_": lambda m: init.constant_(m.head.bias, 3.0),
    "fill_": lambda m: m.inner.bias.data.fill_(0.5),
    "index": lambda m: m.head.bias.data.__setitem__(0, 7.0),
    "in place": lambda m: m.scale.data.__imul__(2.0),
    "data": lambda m: setattr(m.scale, "data", torch.full((6,), 4.0)),
    "replaced": lambda m: setattr(m, "scale", nn.Parameter(torch.full((6,), 2.0))),
    "normal_": lambda m: init.normal_(m.embed.weight, std=3.0),
    "loaded": lambda m: m.load_state_dict(
        {n: torch.ones_like(t) for n, t in m.state_dict().items()}
    ),
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(5, 6))),
    "tied": lambda m: setattr(m.inner, "bias", m.scale),
    "added": lambda m: m.register_module("more", nn.Linear(2, 2)),
}
"""What a target may do to a model after making it."""


def edited(edit: str, *, calls: bool = True) -> Edited:
    model = Edited(calls=calls)
    with torch.no_grad():
        EDITS[edit](model)
    return model


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_a_model_begins_as_its_target_returns_it(edit: str, calls: bool) -> None:
    plan = ModelPlan(target=f"{__name__}:edited", args={"edit": edit, "calls": calls})
    for seed in (0, 3):
        torch.manual_seed(seed)
        plain, model = edited(edit, calls=calls), build_whole(plan, seed=seed)
        assert_equal(plain, model)


def assert_equal(plain: nn.Module, model: nn.Module) -> None:
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        wanted, found = dict(named(plain)), dict(named(model))
        assert wanted.keys() == found.keys()  # a tied one has one name
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


@pytest.mark.parametrize("edit", EDITS)
def test_what_init_weights_would_not_restore_is_refused(edit: str) -> None:
    """Values that are set after the target has called `init_weights()`, and written ones at all."""
    plan = deferred("edited", edit=edit)
    for make in (lambda: build(plan, seed=0), lambda: build_on_meta(plan)):
        with pytest.raises(ColotrainError, match=r"outside of init_weights\(\).*\(.*values.py:\d+"):
            make()
    written = edit not in ("replaced", "untied", "tied", "added")
    plan = deferred("edited", edit=edit, calls=False)
    if written:
        with pytest.raises(ColotrainError, match=r"outside of init_weights\(\)"):
            build(plan, seed=0)
    elif edit != "added":  # as after `edited(edit).init_weights()` in plain torch
        assert build_whole(plan, seed=0).scale.std() > 0


def test_a_reference_has_the_same_deferred_values() -> None:
    """The reference calls init_weights() on a model that is whole from the beginning."""
    assert_equal(build_plain(ZOO, seed=5), build_whole(ZOO, seed=5))
    plan = deferred("Edited", calls=False)
    assert_equal(build_plain(plan, seed=5), build_whole(plan, seed=5))


class Reassigned(nn.Module):
    """Its parameter's memory is freed, and other tensors are drawn in memory of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("drawn", torch.zeros(8, 64, 64))

    def init_weights(self) -> None:
        self.linear.reset_parameters()
        self.linear.weight.data = torch.zeros(64, 64)
        self.drawn.copy_(torch.stack([torch.randn(64, 64) for _ in range(8)]))
        init.normal_(self.linear.weight)


def test_a_reference_draws_only_a_parameters_values_from_its_generator() -> None:
    plan = deferred("Reassigned")
    assert_equal(build_plain(plan, seed=5), build_whole(plan, seed=5))


def test_a_reference_of_a_directory_is_loaded_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    args = {"dtype": "bfloat16"}
    plan = ModelPlan(target="", hf=str(hf.make_directory("gpt2", tmp_path / "gpt2")), args=args)
    assert_equal(build_plain(plan, seed=0), build_whole(plan, seed=0))


class Spectral(nn.Module):
    """Buffers that the constructor computes from a parameter's values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def init_weights(self) -> None:
        init.constant_(self.linear.parametrizations.weight.original, 0.5)


class LooksAtValues(nn.Module):
    """Cannot be made without values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = 1.0 / self.linear.weight.abs().max().item()

    def init_weights(self) -> None:
        init.zeros_(self.linear.weight)


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (deferred("Spectral"), "|".join(["refused them", "is computed from parameters"])),
        (deferred("LooksAtValues"), "refused them .*"),
        (deferred("on_meta"), r"the model has no init_weights\(\)"),
        (ModelPlan(target=f"{__name__}:on_meta"), "weight is on the meta device, without a value"),
    ],
)
def test_a_model_that_cannot_be_made_in_a_way_is_refused_by_name(
    plan: ModelPlan, says: str
) -> None:
    with pytest.raises(ColotrainError, match=says):
        build(plan, seed=0)


def test_an_init_weights_that_is_not_called_is_told() -> None:
    for calls in (False, True):
        args = {"edit": "fill_", "calls": calls}
        plan = ModelPlan(target=f"{__name__}:edited", args=args)
        assert (UNCALLED in survey(plan, FreezePlan(), 8).remarks) is not calls


class KeepsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()

    def train(self, mode: bool = True) -> KeepsStatistics:
        super().train(mode)
        self.norm.eval()
        return self


def test_train_methods_of_the_users_own_are_called_and_parts_in_evaluation_stay_there() -> None:
    inner, frozen = KeepsStatistics(), nn.Dropout().eval()
    begin_training_(nn.Sequential(inner, frozen))
    assert (inner.norm.training, inner.drop.training, frozen.training) == (False, True, False)
    alone = KeepsStatistics().eval()
    begin_training_(alone)
    assert (alone.norm.training, alone.drop.training) == (False, True)
