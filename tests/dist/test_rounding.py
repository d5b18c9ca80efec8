"""Parameters in bfloat16 whose updates are rounded at random or kept, on any ranks and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from colotrain.errors import ConfigError
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS
from tests.checkpoints import read_whole
from tests.dist.conftest import Colotrain
from tests.dist.test_gemini import on_disk
from tests.representatives import representatives

WIDTH = 20


class Scale(nn.Module):
    """A layer whose gradients are sums of small whole numbers, which no order of adding changes."""

    def __init__(self, rows: int, factor: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, rows * WIDTH).view(rows, WIDTH))
        self.bias = nn.Parameter(torch.ones(rows))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat_interleave(self.factor, 1)[:, : len(self.bias)]
        products = rows[:, :, None] * self.weight * x[:, None, :WIDTH]
        return products.sum((1, 2)) + (rows * self.bias).sum(1)


class Whole(nn.Module):
    """Layers whose gradients are exact; where there are `halves`, the first two are in bfloat16.

    In the second round of two ranks, their owners are not in the order of the matrices.
    """

    def __init__(self, *, halves: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale(rows, rows % 3 + 1) for rows in (33, 19, 30, 24))
        self.layers[:2].to(torch.bfloat16 if halves else torch.float32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers).mean()


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randint(-2, 3, (64, 33), generator=draw).float()
    return [{"x": x, "target": torch.tensor(0)} for x in numbers]


def options(rounding: str) -> tuple[str, ...]:
    return (
        *("model.target=tests.dist.test_rounding:Whole", "train.grad_clip=null"),
        *("data.target=tests.dist.test_rounding:samples", f"optim.rounding={rounding}"),
        *("train.global_batch=8", "train.seed=7", "optim.lr=0.001"),
        *("optim.schedule.name=constant", "checkpoint.every=2"),
    )


def state_of(colotrain: Colotrain, name: str, step: int = 4) -> dict[str, Tensor]:
    """Parameters and the optimizer's state of a run's checkpoint, whole."""
    held = read_whole(colotrain.rundir(name).checkpoint(step))
    return {k: v for k, v in held.items() if k.startswith(("model.", "optim."))}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [k for k in wanted if not torch.equal(found[k], wanted[k])]
    assert not different, different


ALL = [(plugin, ranks, micro) for plugin in ROWS for ranks, micro in ((2, 4), (4, 1))]
"""Plugin, ranks and micro-batch: without accumulation, and with two micro-batches a rank."""
SOME = [("zero3", 4, 1), ("gemini", 2, 4)]
CASES = [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_every_plugin_on_any_ranks_has_the_same_bits(
    colotrain: Colotrain, rounding: str, cases: list[tuple[str, int, int]]
) -> None:
    base = (*options(rounding), "train.max_steps=4")
    alone = ("cluster.procs_per_node=1", "train.micro_batch=8", "plugin=zero2", "name=alone")
    colotrain.run(*base, *alone)
    wanted = state_of(colotrain, "alone")
    kept = [k for k in wanted if k.endswith(".compensation")]
    assert len(kept) == (4 if rounding == "kahan" else 0)
    assert all(wanted[k].count_nonzero() > 10 for k in kept)
    for plugin, ranks, micro in cases:
        name = f"{plugin}-{ranks}"
        more = (f"plugin={plugin}", f"cluster.procs_per_node={ranks}", f"train.micro_batch={micro}")
        colotrain.run(*base, *more, f"name={name}")
        assert_equal(state_of(colotrain, name), wanted)


@pytest.mark.parametrize("rounding", representatives(["stochastic", "kahan"], kept=["kahan"]))
def test_a_run_goes_on_with_the_same_bits_on_other_ranks(
    colotrain: Colotrain, rounding: str
) -> None:
    base = (*options(rounding), "train.micro_batch=2")
    colotrain.run(*base, "plugin=zero1", "train.max_steps=4", "name=straight")
    colotrain.run(*base, "plugin=zero3", "train.max_steps=2", "name=half")
    colotrain.resume("half", "plugin=gemini", "cluster.procs_per_node=1", "train.max_steps=4")
    assert_equal(state_of(colotrain, "half"), state_of(colotrain, "straight"))
    colotrain.run(*base, "plugin=gemini", *on_disk(colotrain), "train.max_steps=2", "name=disk")
    colotrain.resume("disk", "train.max_steps=4")
    assert_equal(state_of(colotrain, "disk"), state_of(colotrain, "straight"))


def test_the_plan_counts_what_a_run_keeps_beside_parameters(colotrain: Colotrain) -> None:
    base = ("train.micro_batch=4", "plugin=zero3", "train.max_steps=2")
    for rounding in ("stochastic", "kahan"):
        colotrain.run(*options(rounding), *base, f"name={rounding}")
        planned = colotrain.rundir(rounding).plan().memory.optimizer
        kept = [e.fields["optimizer"] for e in colotrain.events(rounding) if e.kind == "memory"]
        assert planned == max(kept)
    plans = [colotrain.rundir(r).plan().memory.optimizer for r in ("stochastic", "kahan")]
    rows = 17 + 10  # the larger of two parts of 33 and of 19 rows
    assert plans[1] - plans[0] == rows * (WIDTH + 1) * 2


def test_what_cannot_be_rounded_so_is_refused_in_a_line() -> None:
    for overrides, line in [
        (["optim.name=lion"], "optim.name=lion: expected adamw with optim.rounding=kahan: the oth"),
        (["mesh.tp=2"], "optim.rounding=kahan: expected nearest with mesh.tp=2: random bits follo"),
        (["model.target=tests.dist.difficult:make", "model.args.name=Stack"], "optim.rounding=kah"),
    ]:
        with pytest.raises(ConfigError) as caught:
            plan_from([*options("kahan"), "train.micro_batch=4", *overrides])
        assert line in str(caught.value)
