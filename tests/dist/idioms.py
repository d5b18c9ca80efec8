"""Models and data in other people's idioms, for runs that train or refuse but never differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 11, 8, 64


def tokens(num: int = 64, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Random tokens as inputs, and the next ones as labels."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, VOCAB, (num, length + 1), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def copied() -> list[dict[str, Tensor]]:
    """Tokens with labels in transformers' convention: the inputs themselves."""
    return [{**sample, "labels": sample["input_ids"].clone()} for sample in tokens()]


class HalfLoss(nn.Module):
    """Returns the mean loss in the precision that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())


class Countdown(HalfLoss):
    """Keeps a dict as extra state, and its loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"forwards": 0, "amax": [torch.zeros(2)]}

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss = super().forward(input_ids, labels)
        if self.training:
            self.seen["forwards"] += 1
            self.seen["amax"][0] += 1.0
        return loss * (1.0 + 0.01 * self.seen["forwards"] + self.seen["amax"][0].mean())

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Unsaveable(Countdown):
    """Its extra state is a function."""

    def get_extra_state(self) -> Any:
        return {"hook": [print]}


class OwnSteps(torch.optim.Optimizer):
    """Counts steps in an int for each parameter, and in a number that it adds to its groups."""

    def __init__(self, params: Any, *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "shrink": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["shrink"] *= 0.5
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    rate = group["lr"] * (1 + group["shrink"]) * state["step"] ** 0.5
                    p.add_(p.grad, alpha=-rate / group["calls"])


class Shifts(HalfLoss):
    """Shifts labels itself, as transformers' losses do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), shifted.flatten())


class Summed(HalfLoss):
    """Its loss is a sum, and it normalizes the activations of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.norm(self.logits(input_ids).flatten(0, 1))
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


class NeverZero(HalfLoss):
    """The logit of token 0 is masked; all labels are other tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.logits(input_ids)
        logits = logits.masked_fill(torch.arange(VOCAB) == 0, float("-inf"))
        return F.cross_entropy(
            logits.flatten(0, 1), labels.clamp(min=1).where(labels >= 0, labels).flatten()
        )


class Regression(nn.Module):
    """Compares with large numbers, which half precision would round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert target.dtype in (torch.float32, torch.float64)
        for layer in self.layers:
            x = F.gelu(layer(x))
        found = self.scale(x).squeeze(-1)
        return F.mse_loss(found.double(), (target - 100100.0).double()).to(target.dtype)


def numbers(num: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num, WIDTH, generator=generator)
    return [{"x": row, "target": 100100.0 + row.sum()} for row in x]


class Normalised(HalfLoss):
    """Frozen statistics in float32, between activations in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x + F.gelu(self.layers[0](x)))


class Large(HalfLoss):
    """Its gradients times the first loss scale are infinite in fp16."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss_sum = F.cross_entropy(
            self.logits(input_ids).flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )
        return 64.0 * loss_sum, (labels >= 0).sum()


class Late(HalfLoss):
    """Uses a layer's weight outside the layer: after some training forwards, or only in evaluation,
    as a tensor or as a number."""

    def __init__(self, how: str, after: int = 1) -> None:
        super().__init__()
        self.how, self.after, self.forwards = how, after, 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss = super().forward(input_ids, labels)
        weight = self.layers[0].weight
        self.forwards += self.training
        if self.how == "evaluation" and not self.training:
            loss = loss + weight.square().sum()
        if self.how == "number" and self.forwards > self.after:
            loss = loss * weight.detach().norm().item()
        if self.how == "tensor" and self.forwards > self.after:
            loss = loss + weight.square().sum()
        return loss


class FailsOnce(HalfLoss):
    """Raises in a backward in the middle of its second step, when a file is not there yet."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.forwards = Path(file), 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss = super().forward(input_ids, labels)
        self.forwards += self.training
        if self.forwards == 4 and not self.file.exists():
            loss.register_hook(self.fail)
        return loss

    def fail(self, grad: Tensor) -> None:
        self.file.touch()
        raise RuntimeError("a hook of the user's")
