"""Random small models whose constructors and targets set values in many ways.

By hand: `python -m tests.dist.random_constructors 60` compares the first losses of that many
models, under every plugin on 1 and 2 ranks, with plain torch's.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

CLASSES, WIDTH, SAMPLES = 5, 6, 8
STEPS = ("train.global_batch=8", "train.max_steps=1", "train.eval_steps=0")


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Shifted(nn.Module):
    """A parametrization with a buffer that is made of values of the parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", weight.detach().mean(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def _numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] = np.random.standard_normal(weight.shape) * 0.3


WRITES: dict[str, Callable[[Tensor], object]] = {
    "constant_": lambda w: nn.init.constant_(w, 0.3),
    "orthogonal_": nn.init.orthogonal_,
    "normal_": lambda w: nn.init.normal_(w, std=0.4),
    "fill_": lambda w: w.data.fill_(0.2),
    "mul_": lambda w: w.data.mul_(3.0),
    "rows": lambda w: w.data.__setitem__(0, 0.7),
    "half": lambda w: nn.init.uniform_(w[:, : WIDTH // 2], 0.1, 0.4),
    "data": lambda w: setattr(w, "data", torch.randn(w.shape) * 0.3),
    "not contiguous": lambda w: setattr(w, "data", torch.randn(w.shape[::-1]).t() * 0.3),
    "copy_": lambda w: w.data.copy_(torch.eye(*w.shape)),
    "numpy": _numpy,
    "python": lambda w: w.data.fill_(random.random()),
    "generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(3)),
    "sparse_": lambda w: nn.init.sparse_(w, 0.4),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.2),
    "softmax": lambda w: w.data.copy_(w.data.softmax(-1)),
}
"""Ways to set the values of a matrix."""


def _weights(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.ndim == 2]


def _replaced(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.15))
    return layer


def _pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.3)


def _shifted(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Shifted(layer.weight))
    return layer


def _symmetric(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def _set_through(layer: nn.Linear) -> nn.Module:
    """Assigns the weight of a parametrized layer, which sets what it is computed from."""
    layer = parametrizations.weight_norm(layer)
    layer.weight = torch.randn(WIDTH, WIDTH) * 0.3
    return layer


WRAPS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda layer: layer,
    "replaced": _replaced,
    "weight_norm": parametrizations.weight_norm,
    "weight_norm, old": nn.utils.weight_norm,
    "set through weight_norm": _set_through,
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
    "orthogonal": parametrizations.orthogonal,
    "symmetric": _symmetric,
    "shifted": _shifted,
    "pruned": _pruned,
    "bare": lambda layer: nn.Sequential(layer, Bare()),
    "statistics": lambda layer: nn.Sequential(layer, nn.BatchNorm1d(WIDTH).eval()),
}


class Bare(nn.Module):
    """Parameters and buffers of its own, with constants, draws and values of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mean", self.mix.detach().mean(1))
        self.register_buffer("noise", torch.randn(WIDTH), persistent=False)
        self.plain = torch.rand(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix) * self.gain * self.scalar + self.mean + self.noise + self.plain


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, padding_idx=draw.choice([None, 0]))
        wraps = [draw.choice(list(WRAPS)) for _ in range(draw.randint(2, 4))]
        self.layers = nn.ModuleList(WRAPS[w](nn.Linear(WIDTH, WIDTH)) for w in wraps)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if draw.random() < 0.4:
            self.head.weight = self.embed.weight
        if draw.random() < 0.3:
            self.layers.append(self.layers[0])
        with torch.no_grad():
            for weight in draw.sample(_weights(self), 2):
                WRITES[draw.choice(list(WRITES))](weight)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(self.norm(x)), labels)


class WithInit(Model):
    """Has an `init_weights()` that sets other values, and may call it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        if draw.random() < 0.5:
            self.init_weights()

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)


def _loads(model: Model) -> None:
    state = {n: t * 1.1 if t.is_floating_point() else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)


def _assigns(model: Model) -> None:
    state = {"norm.weight": torch.linspace(0.5, 1.5, WIDTH), "norm.bias": torch.rand(WIDTH)}
    model.load_state_dict(state, strict=False, assign=True)


def _freezes(model: Model) -> None:
    model.layers[0].requires_grad_(False)
    nn.init.constant_(model.head.bias, 0.5)


EDITS: dict[str, Callable[[Model], object]] = {
    "nothing": lambda m: None,
    "head": lambda m: nn.init.constant_(m.head.weight, 0.25),
    "bias": lambda m: m.head.bias.data.copy_(torch.linspace(-1, 1, CLASSES)),
    "index": lambda m: m.embed.weight.data.__setitem__(1, 2.0),
    "module": lambda m: setattr(m, "head", nn.Linear(WIDTH, CLASSES)),
    "copy": lambda m: m.layers.append(copy.deepcopy(m.norm)),
    "loads": _loads,
    "assigns": _assigns,
    "vector": lambda m: nn.utils.vector_to_parameters(torch.rand(12), m.norm.parameters()),
    "applies": lambda m: m.apply(lambda x: x.reset_parameters() if x is m.norm else None),
    "cast": lambda m: m.bfloat16().float(),
    "freezes": _freezes,
    "tie": lambda m: setattr(m.head, "weight", m.embed.weight),
    "all": lambda m: [p.data.mul_(0.9) for p in m.parameters()],
}
"""What a target does to a model after making it."""


def make(seed: int) -> nn.Module:
    draw = random.Random(seed)
    model = draw.choice([Model, WithInit])(draw)
    with torch.no_grad():
        for edit in draw.sample(list(EDITS), 2):
            EDITS[edit](model)
    return model


def samples() -> list[dict[str, Tensor]]:
    """As many as a step takes."""
    ids = torch.arange(SAMPLES)
    return [{"input_ids": n % CLASSES, "labels": (n * n + 1) % CLASSES} for n in ids]


def plain_loss(seed: int) -> float:
    """What a program of three lines computes first."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    model, rows = make(seed), samples()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return model(**batch).item()


def first_losses(
    seeds: Sequence[int], plugins: Sequence[str], ranks: Sequence[int], folder: Path
) -> Iterator[tuple[int, str, int, float, str]]:
    """(seed, plugin, ranks, first loss, what `verify` says) of every case."""
    from colotrain.runs.resolving import plan_from
    from colotrain.verify.runner import case_of, verify

    for size in ranks:
        plans, keys = [], [(seed, plugin) for seed in seeds for plugin in plugins]
        for seed, plugin in keys:
            own = f"plugin={plugin}", f"model.args.seed={seed}", f"train.seed={seed}"
            plans.append(plan_from([*SETTINGS, *own, f"cluster.procs_per_node={size}"]))
        for index, result in enumerate(verify(plans, folder)):
            case = case_of(folder, size, index)
            loss = json.loads(case.verification_file.read_text("utf-8"))["losses"][0]
            yield (*keys[index], size, loss, result.difference or "same")


SETTINGS = (
    "model.target=tests.dist.random_constructors:make",
    "data.target=tests.dist.random_constructors:samples",
    "data.validation_fraction=0",
    *STEPS,
    "train.micro_batch=2",
    "optim.name=sgd",
    "optim.lr=0.1",
    "checkpoint.every=0",
    "name=constructors",
)


def compared(
    seeds: Sequence[int], plugins: Sequence[str], ranks: Sequence[int], folder: Path
) -> Iterator[tuple[str, float]]:
    """A description of each case, and how far its first loss is from plain torch's.

    A model whose loss is not finite in plain torch is left out.
    """
    every = {seed: plain_loss(seed) for seed in seeds}
    plain = {seed: loss for seed, loss in every.items() if math.isfinite(loss)}
    for seed, plugin, size, loss, said in first_losses(list(plain), plugins, ranks, folder):
        off = abs(loss - plain[seed]) / abs(plain[seed])
        yield (
            f"seed {seed}, {plugin}, {size} ranks: {loss:.7g}, plain {plain[seed]:.7g}; {said}",
            off,
        )


def main(count: int, first: int = 0) -> int:
    from colotrain.spec.plugins import ROWS

    worst, num, wrong = 0.0, 0, 0
    for start in range(first, first + count, 10):
        seeds = range(start, min(start + 10, first + count))
        with tempfile.TemporaryDirectory() as folder:
            for text, off in compared(seeds, list(ROWS), (1, 2), Path(folder)):
                num, worst = num + 1, max(worst, off)
                if off > 1e-6 or not text.endswith("same"):
                    wrong += 1
                    print(text, flush=True)
        print(f"{num} cases, {wrong} differ; largest relative difference {worst:.2g}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
