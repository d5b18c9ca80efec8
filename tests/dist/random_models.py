"""Random small models, each a function of its seed: blocks, sharing, freezing, dtypes, losses.

By hand: `python -m tests.dist.random_models 200 [FIRST_SEED] [PRECISION]` prints a line per seed.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, LENGTH, SAMPLES, FEWEST_SAMPLES = 7, 6, 48, 6


class Mlp(nn.Module):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        inner = draw.choice([width, 2 * width, 5])
        self.norm = draw.choice([nn.LayerNorm, nn.RMSNorm, lambda w: nn.GroupNorm(1, w)])(width)
        self.up = nn.Linear(width, inner, bias=draw.random() < 0.7)
        self.down = nn.Linear(inner, width, bias=draw.random() < 0.7)
        self.act = draw.choice([F.gelu, F.silu, torch.tanh])
        self.gain = nn.Parameter(torch.tensor(0.5)) if draw.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x.reshape(-1, x.shape[-1])).view_as(x)
        out = self.down(self.act(self.up(flat)))
        return x + (out if self.gain is None else out * self.gain)


class Attention(nn.Module):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True, bias=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.inner = draw.choice([nn.LSTM, nn.GRU])(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


class Convolution(nn.Module):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, 3, padding=1)
        if draw.random() < 0.4:
            self.inner = nn.utils.parametrizations.weight_norm(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class Routed(nn.Module):
    """Experts by the sign of a feature: some are used by some micro-batches only."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(width, draw) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (x[..., 0] > 0).long() == index
            if chosen.any():
                out[chosen] = expert(x[chosen])
        return x + out


class Stateful(nn.Module):
    """A persistent buffer that is used, and one that counts."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + torch.tanh(self.linear(x + self.shift))


class Frozen(nn.Module):
    """In a dtype of its own, and never trained."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.linear(x)


BLOCKS = (Mlp, Mlp, Attention, Recurrent, Convolution, Routed, Stateful, Frozen)


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = width = draw.choice([4, 6, 8])
        self.embed = nn.Embedding(CLASSES, width, padding_idx=draw.choice([None, 0]))
        kinds = [draw.choice(BLOCKS) for _ in range(draw.randint(1, 4))]
        if draw.random() < 0.4:  # like layers
            kinds = kinds[:1] * draw.randint(2, 4)
        self.blocks = nn.ModuleList(kind(width, draw) for kind in kinds)
        self.order = list(range(len(kinds)))
        if draw.random() < 0.2:
            self.order.append(draw.randrange(len(kinds)))  # called twice
        if draw.random() < 0.15:
            self.blocks.append(self.blocks[0])  # the same module under two names
            self.order.append(len(kinds))
        self.head = nn.Linear(width, CLASSES, bias=draw.random() < 0.5)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        if draw.random() < 0.2:
            self.unused = nn.Linear(3, 5)
        if draw.random() < 0.3:
            self.offset = nn.Parameter(torch.linspace(-0.1, 0.1, width))
        if draw.random() < 0.2:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if draw.random() < 0.25:
            keep = (torch.arange(CLASSES) % 3 > 0)[:, None]
            self.embed.weight.register_hook(lambda grad: grad * keep.to(grad.dtype))
        for parameter in self.parameters():
            if draw.random() < 0.1 and parameter is not self.embed.weight:
                parameter.requires_grad_(False)
        if draw.random() < 0.15:
            self.double()
        self.output = draw.choice(["mean", "mean", "sum", "object", "count", "shifted"])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        if hasattr(self, "offset"):
            x = x + self.offset
        for index in self.order:
            x = self.blocks[index](x)
        logits = self.head(x)
        if self.output == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.output == "sum":
            return F.cross_entropy(logits, labels, reduction="sum"), (labels >= 0).sum()
        loss = F.cross_entropy(logits, labels)
        if self.output == "object":
            return SimpleNamespace(loss=loss)
        if self.output == "count":
            return SimpleNamespace(loss=loss, num_targets=(labels >= 0).sum())
        return loss


def make(seed: int) -> nn.Module:
    return Model(seed)


def samples(seed: int) -> list[dict[str, Tensor]]:
    """Tokens and labels; every few labels are masked by the data itself."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.2] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def overrides_of(seed: int, *, precision: str = "fp32") -> list[str]:
    """A plan for the model: plugin, ranks, accumulation, freezing and more, drawn by the seed."""
    from colotrain.spec.plugins import ROWS

    draw = random.Random(-1 - seed)
    ranks, accumulation, micro = (
        draw.choice([1, 2, 2, 3]),
        draw.choice([1, 2, 3]),
        draw.choice([1, 2]),
    )
    # fewer samples may have no target at all, whose mean is not a number in the reference
    micro = max(micro, -(-FEWEST_SAMPLES // (ranks * accumulation)))
    names = [n for n, p in make(seed).named_parameters() if p.requires_grad and p.numel()]
    frozen = (
        draw.sample(names, draw.randint(1, max(1, len(names) // 2))) if draw.random() < 0.4 else []
    )
    frozen = frozen if len(frozen) < len(names) else []
    chosen = [
        "model.target=tests.dist.random_models:make",
        f"model.args.seed={seed}",
        "data.target=tests.dist.random_models:samples",
        f"data.args.seed={seed}",
        f"plugin={draw.choice(list(ROWS))}",
        f"train.global_batch={ranks * accumulation * micro}",
        f"train.micro_batch={micro}",
        f"train.seed={seed}",
        f"train.precision={precision}",
        "train.max_steps=2",
        "train.eval_steps=1",
        f"train.grad_clip={draw.choice(['null', 'null', '0.5'])}",
        f"train.activation_checkpointing={draw.choice(['none', 'none', 'full', 'selective'])}",
        "optim.name=sgd",  # adamw makes whole steps of gradients that are rounding (a key's bias)
        "optim.lr=0.05",
        "optim.schedule.name=constant",
        f"cluster.procs_per_node={ranks}",
        "checkpoint.every=0",
        f"name=random-{seed}",
    ]
    return chosen + ([f"freeze.patterns=[{','.join(frozen)}]"] if frozen else [])


def outcomes(
    seeds: Iterable[int], folder: Path, *, precision: str = "fp32"
) -> Iterator[tuple[int, str]]:
    """(seed, "equal", "refused: …" before the first step, or what differs), in no certain order.

    The models of one number of ranks share a launch; where that ends early, each has one.
    """
    from colotrain.errors import ColotrainError
    from colotrain.runs.resolving import plan_from

    plans: dict[int, list[tuple[int, Any]]] = {}
    for seed in seeds:
        try:
            plan = plan_from(overrides_of(seed, precision=precision))
        except ColotrainError as error:
            yield seed, f"refused: {error}"
            continue
        plans.setdefault(plan.world_size, []).append((seed, plan))
    for ranks, group in plans.items():
        yield from _compared(group, folder / f"{ranks}")


def _compared(group: list[tuple[int, Any]], folder: Path) -> Iterator[tuple[int, str]]:
    from colotrain.errors import ColotrainError
    from colotrain.verify.runner import verify

    try:
        results = list(verify([plan for _, plan in group], folder))
    except ColotrainError as error:
        if len(group) == 1:
            files = [file.read_text("utf-8") for file in folder.rglob("rank*.jsonl")]
            began = any('"kind":"step"' in text.replace(" ", "") for text in files)
            is_refusal = any(
                name in str(error) for name in ("ColotrainError", "ConfigError", "UsageError")
            )
            kind = "refused" if is_refusal and not began else "FAILED"
            yield group[0][0], f"{kind}: {error}"
            return
        half = len(group) // 2
        yield from _compared(group[:half], folder / "a")
        yield from _compared(group[half:], folder / "b")
        return
    for (seed, plan), result in zip(group, results, strict=True):
        known = f"{plan.plugin.name}, {plan.world_size} ranks"
        yield seed, "equal" if result.passed else f"DIFFERS under {known}: {result.difference}"


def main(count: int, first: int = 0, precision: str = "fp32") -> int:
    wrong, tally = 0, {"equal": 0, "refused": 0}
    with tempfile.TemporaryDirectory() as folder:
        for start in range(first, first + count, 50):
            seeds = range(start, min(start + 50, first + count))
            for seed, said in outcomes(seeds, Path(folder) / f"{start}", precision=precision):
                kind = said.partition(":")[0]
                tally[kind] = tally.get(kind, 0) + 1
                wrong += kind not in ("equal", "refused")
                if said != "equal":
                    print(f"seed {seed}: {said}", flush=True)
            print(f"up to seed {seeds[-1]}: {tally}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    number, *rest = sys.argv[1:]
    sys.exit(main(int(number), *(int(r) if r.isdecimal() else r for r in rest)))  # type: ignore[arg-type]
