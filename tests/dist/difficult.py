"""Models that break sharded training elsewhere, each as a user would write it, and their data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, SAMPLES = 12, 5, 96


def samples(num: int = SAMPLES, width: int = WIDTH, seed: int = 0) -> list[dict[str, Tensor]]:
    """Vectors with a class each; `kind` is a number that differs between neighbours."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, width, generator=generator)
    target = torch.randint(0, CLASSES, (num,), generator=generator)
    return [{"x": x[i], "target": target[i], "kind": torch.tensor(i % 3)} for i in range(num)]


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    """The plain case: like layers in a list, a head, the mean loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Any:
        return F.cross_entropy(self.head(self.features(x)), target)


class Unused(Stack):
    """A layer and a bare parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Layer()
        self.spare_scale = nn.Parameter(torch.ones(3))


class UnusedBlock(Stack):
    """The last of the repeated layers is never called."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


class Router(Stack):
    """Experts, each used by some samples only: by some ranks and micro-batches, not by others."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        hidden = self.features(x)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            chosen = kind == index
            if chosen.any():
                out[chosen] = expert(hidden[chosen])
        return F.cross_entropy(self.head(out), target)


class NestedRouter(nn.Module):
    """Experts inside each repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        for experts in self.blocks:
            for index, expert in enumerate(experts):
                chosen = kind == index
                if chosen.any():
                    x = x + torch.zeros_like(x).masked_scatter(
                        chosen[:, None].expand_as(x), expert(x[chosen])
                    )
        return F.cross_entropy(self.head(x), target)


class CalledTwice(Stack):
    """One layer of the list runs twice in a forward."""

    def features(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2):
            x = self.layers[index](x)
        return x


class Tied(Stack):
    """One tensor under three names, two of them in blocks."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.layers[2].linear.weight = self.layers[0].linear.weight
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixer.weight = self.layers[0].linear.weight

    def features(self, x: Tensor) -> Tensor:
        return self.mixer(super().features(x))


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


class Sequences(Stack):
    """Blocks that are `nn.Sequential`, one of them with other layers inside."""

    def __init__(self) -> None:
        super().__init__()
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList([sequence(), sequence(), other, sequence()])


class SequencesByHand(Sequences):
    """A forward that calls the layers in them, and never the `nn.Sequential` itself."""

    def features(self, x: Tensor) -> Tensor:
        for layers in self.layers:
            for layer in layers:
                x = layer(x)
        return x


class RootParameters(Stack):
    """Parameters directly on the root: a scalar, an empty one, a single number, prime sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))
        self.single = nn.Parameter(torch.full((1,), 0.3))
        self.prime = nn.Parameter(torch.linspace(-1, 1, 13))
        self.tall = nn.Parameter(torch.linspace(-1, 1, 7 * WIDTH).reshape(7, WIDTH))

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x) * self.scale + self.single + self.nothing.sum()
        return x + (self.tall * self.prime[:7, None]).sum(0) + self.prime[:WIDTH]


class Dropout(Stack):
    """Drops activations: verify turns that off, here and in the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(super().features(x))


class Buffers(Stack):
    """A buffer that is used and one that each training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().features(x + self.shift)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    cache: None = None


class LayerOfManyOutputs(Layer):
    """Returns a dict that holds a tuple, a None and a dataclass."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        out = super().forward(x)
        return {"pair": (out, None), "nested": Output(loss=out.mean(), logits=out), "none": None}


class Structured(nn.Module):
    """Blocks that return structures, and a model that returns an object with `.loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerOfManyOutputs() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Output:
        for layer in self.layers:
            out = layer(x)
            x = out["pair"][0] + out["nested"].logits
        logits = self.head(x)
        return Output(loss=F.cross_entropy(logits, target), logits=logits)


class SumAndCount(Stack):
    """Returns the summed loss and how many samples it counts, which differs between batches."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(self.head(self.features(x)), target, reduction="none")
        counted = kind != 1
        return (losses * counted).sum(), counted.sum()


class MeanOfTargets(nn.Module):
    """The mean over targets that are not -100, of which a micro-batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss, logits=logits)


def token_samples(num: int = SAMPLES, length: int = 5) -> list[dict[str, Tensor]]:
    """Random tokens, each with the next as its label."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, CLASSES, (num, length + 1), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


class Double(Stack):
    """Weights and inputs in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x.double(), target, kind)


class OwnFreeze(Stack):
    """The user's own code freezes a layer and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Switching(Stack):
    """Behaves otherwise in evaluation; a forward in evaluation must leave training as it is."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return x if self.training else self.layers[0](x)


class OwnInit(Stack):
    """Defines `init_weights`, which sets its parameters and a buffer after sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.empty(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x + self.shift)

    def init_weights(self) -> None:
        self.shift.copy_(torch.linspace(0, 1, WIDTH))
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, nn.LayerNorm):
                nn.init.trunc_normal_(module.bias, std=0.02)


class Hooks(Stack):
    """Gradients that the model's own hooks mask: by a product, in place, and not any more."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.ones(CLASSES, 1)
        rows[:2] = 0.0
        self.head.weight.register_hook(lambda grad: grad * rows)
        self.layers[0].linear.weight.register_hook(self.without_first_row)
        self.layers[1].linear.weight.register_hook(torch.zeros_like).remove()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.scale.register_hook(lambda grad: grad * 3.0)
        self.layers[2].linear.bias.gain = 1.5  # type: ignore[attr-defined]

    @staticmethod
    def without_first_row(grad: Tensor) -> None:
        grad[0] = 0.0

    def features(self, x: Tensor) -> Tensor:
        gain = self.layers[2].linear.bias.gain  # type: ignore[union-attr]
        return super().features(x * gain) * self.scale


class PaddingIdx(Stack):
    """Token vectors of which one is padding, initialised as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH, padding_idx=1)
        with torch.no_grad():
            self.init_weights()

    def init_weights(self) -> None:
        self.apply(self._init_weights)
        nn.init.orthogonal_(self.layers[0].linear.weight)
        nn.init.normal_(self.layers[1].linear.weight[: WIDTH // 2], std=0.3)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x + self.embed(kind), target, kind)


class Attention(Stack):
    """torch's own attention, whose packed weight is used without its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)
        )

    def features(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = x + mixer(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]
        return super().features(x)


class Recurrent(Stack):
    """A recurrent layer, which keeps a second list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.lstm(x[:, None])[0][:, 0])


class WeightNorm(Stack):
    """Weights computed from two parameters each, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(self.head)
        for layer in self.layers:
            layer.linear = nn.utils.weight_norm(layer.linear)


class ExtraState(Stack):
    """A module with state beside parameters and buffers."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state["version"] == 3


class Teacher(Stack):
    """A frozen copy of the layers, asked without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        wanted = x
        with torch.no_grad():
            for layer in self.teacher:
                wanted = layer(wanted)
        found = self.features(x)
        return F.cross_entropy(self.head(found), target) + F.mse_loss(found, wanted + 1.0)


class FrozenStatistics(Stack):
    """Batch normalisation that stays in evaluation while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH).eval()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.batch_norm(x))


class EarlyExit(Stack):
    """Leaves its last layer out in training."""

    def features(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.training and index == 2:
                break
            x = layer(x)
        return x


class StochasticDepth(Stack):
    """Samples skip layers, by their kind instead of by chance."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + (layer(x) - x) * (kind != index)[:, None]
        return F.cross_entropy(self.head(x), target)


class TiedModules(Stack):
    """A module under two names, and one layer inside two others."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]
        self.layers[2].linear = self.layers[1].linear

    def features(self, x: Tensor) -> Tensor:
        return self.again(super().features(x))


class Transposed(Stack):
    """A parameter that does not lie in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def features(self, x: Tensor) -> Tensor:
        return super().features(x @ self.mixer)


class MixedDtypes(Stack):
    """Every other layer in float64, as neighbours of which gemini could make one group."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.layers[1].double()
        self.layers[3].double()

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.linear.weight.dtype))
        return x.to(self.head.weight.dtype)


class HalfBlocks(MixedDtypes):
    """One layer in bfloat16 and a frozen one in float16, in a model that is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.float()
        self.layers[1].bfloat16()
        self.layers[2].half().requires_grad_(False)


class LayerInPlace(Layer):
    """Changes what it is given, returns that, and a view of its weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x *= 0.5
        x += super().forward(x.clone())
        return x, self.linear.weight.view(-1)


class LayerOfViews(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 3, WIDTH // 3).flatten(1)


class InPlace(Stack):
    """Layers that change their inputs, and outputs that are views and changed by others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerInPlace() for _ in range(3))
        self.views = nn.ModuleList(LayerOfViews() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        penalty = torch.zeros((), dtype=x.dtype)
        for view in self.views:
            x = view(x)
            x += 1.0
        for layer in self.layers:
            x, weight = layer(x)
            penalty = penalty + weight.square().mean()
        return F.cross_entropy(self.head(x), target) + penalty


class Penalty(Stack):
    """Weights that are used outside their layers, before the layers run and afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        x = x * self.layers[0].linear.weight.abs().mean()
        for other in self.others:
            x = other(x)
        loss = super().forward(x, target, kind)
        return loss + 0.01 * sum(p.square().sum() for p in self.layers.parameters())


class InputGradient(Stack):
    """A penalty on the gradient of the input, which forward takes through its layers."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Any:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            logits = self.head(self.features(x))
            (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return F.cross_entropy(logits, target) + 0.1 * slope.square().mean()


class Tangent(Stack):
    """A derivative of the layers along a direction, by `torch.func`."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Any:
        features, slope = torch.func.jvp(self.features, (x,), (torch.ones_like(x),))
        return F.cross_entropy(self.head(features), target) + 0.1 * slope.square().mean()


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Complex(Stack):
    """Complex layers, a complex buffer, and a complex scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.rotations = nn.ModuleList(Rotation() for _ in range(2))
        self.phase = nn.Parameter(torch.tensor(0.8 + 0.6j))
        self.register_buffer("shift", torch.randn(WIDTH, dtype=torch.complex64))

    def features(self, x: Tensor) -> Tensor:
        turned = super().features(x).to(self.shift.dtype) + self.shift
        for rotation in self.rotations:
            turned = rotation(turned) * self.phase
        return turned.real + turned.abs()


MODELS = {
    model.__name__: model
    for model in (
        Stack,
        Unused,
        UnusedBlock,
        Router,
        NestedRouter,
        CalledTwice,
        Tied,
        Sequences,
        SequencesByHand,
        RootParameters,
        Dropout,
        Buffers,
        Structured,
        SumAndCount,
        MeanOfTargets,
        Double,
        OwnFreeze,
        Switching,
        OwnInit,
        Hooks,
        PaddingIdx,
        Attention,
        Recurrent,
        WeightNorm,
        ExtraState,
        Teacher,
        FrozenStatistics,
        EarlyExit,
        StochasticDepth,
        TiedModules,
        Transposed,
        MixedDtypes,
        HalfBlocks,
        InPlace,
        Penalty,
        InputGradient,
        Tangent,
        Complex,
    )
}


def make(name: str) -> nn.Module:
    return MODELS[name]()
