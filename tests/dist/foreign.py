"""Models in other people's idioms: each trains as in plain torch, or is refused with a reason."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.dist.difficult import CLASSES, WIDTH, Layer, Stack


class DeepcopyEma(Stack):
    """An averaged copy of the layers as a submodule, brought up to date in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.layers.parameters(), strict=True):
                mean.lerp_(now, 0.1)
            for layer in self.average:
                x = layer(x)
        return found + 0.1 * x


class HiddenEma(Stack):
    """An averaged copy that is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [copy.deepcopy(self.layers).requires_grad_(False)]

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        with torch.no_grad():
            for mean, now in zip(
                self.hidden[0].parameters(), self.layers.parameters(), strict=True
            ):
                mean.lerp_(now.to(mean.dtype), 0.1)
        return found + 0.1 * self.hidden[0][0](x.to(self.hidden[0][0].linear.weight.dtype))


class DoubleEma(HiddenEma):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.hidden[0].double()

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x.double(), target, kind)


class StateDictEma(Stack):
    """An average of `state_dict()`, kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {n: v.clone() for n, v in self.layers.state_dict().items()}

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            for name, value in self.layers.state_dict().items():
                self.average[name] = self.average[name].lerp(
                    value.to(self.average[name].dtype), 0.1
                )
        gain = 1.0 + self.average["0.linear.weight"].square().mean()
        return super().features(x) * gain.to(x.dtype)


class BufferEma(Stack):
    """An average of a weight in a buffer, beside the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.head.weight.detach().clone())

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.head.weight.to(self.average.dtype), 0.1)
        return super().features(x) * (1.0 + self.average.square().mean().to(x.dtype))


class ReplacedBuffer(Stack):
    """A buffer that each forward replaces by another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1.0
        return super().features(x) * (1.0 + 0.0 * self.calls)


class DataTied(Stack):
    """Two parameters on one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight.data = self.layers[0].linear.weight.data


class ViewParameter(Stack):
    """A parameter that is a part of another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(self.head.weight.data[0])

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.gain


class BufferOfParameter(Stack):
    """A buffer that looks at a parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", self.head.weight.data)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1.0 + self.fixed.square().mean())


class AttributeOfParameter(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = {"head": [self.head.weight.detach()]}

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1.0 + self.fixed["head"][0].square().mean())


class HalvesOfOne(Stack):
    """Two parameters in one memory, of which neither has an element of the other's."""

    def __init__(self) -> None:
        super().__init__()
        left, right = torch.randn(WIDTH, 2 * WIDTH).chunk(2, dim=1)
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x @ self.left) + x @ self.right


class ListOfParameters(Stack):
    """Keeps its parameters in a list of its own, and uses them there."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.linear.weight for layer in self.layers]

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        penalty = sum(weight.square().sum() for weight in self.weights)
        return super().forward(x, target, kind) + 0.01 * penalty


class ListForNothing(Stack):
    """Keeps its parameters in a list, and looks at their shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [p for p in self.parameters() if p.ndim > 1]

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * float(len(self.weights) + self.weights[0].shape[0])


class PruningHook(Stack):
    """A hook that looks at the parameter it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.head.weight
        weight.register_hook(lambda grad: grad * (weight.abs() > 0.05))


class ModuleInList(Stack):
    """Reaches its layers by a list beside the modules, and by a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.layers[1], self.layers[0]]
        self.last = weakref.ref(self.layers[2])

    def features(self, x: Tensor) -> Tensor:
        for layer in (*self.order, self.last()):
            x = layer(x)
        return x


class Orthogonal(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.orthogonal(layer.linear)


class SpectralNorm(Stack):
    """In evaluation: power iterations in training would change with every forward."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.head)
        self.head.eval()


class Cached(Stack):
    """Parametrizations that are computed once for a forward."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.head)

    def features(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().features(x) + self.head.weight.sum(0) + self.head.weight.mean()


class Checkpointed(Stack):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class ReentrantCheckpoint(Stack):
    def features(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class CheckpointInside(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = self.computed_again(layer.forward)

    @staticmethod
    def computed_again(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: checkpoint(forward, x, use_reentrant=False)


class CheckpointOfAll(Stack):
    """One checkpoint around all layers."""

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(super().features, x, use_reentrant=False)


class Vmapped(Stack):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = vmap(layer)(x)
        return x


class Ensemble(Stack):
    """Stacks the weights of its members, and maps over them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = [copy.deepcopy(self.layers[0]).to("meta")]

    def features(self, x: Tensor) -> Tensor:
        params = {
            name: torch.stack([dict(layer.named_parameters())[name] for layer in self.layers])
            for name, _ in self.base[0].named_parameters()
        }
        return vmap(lambda p: functional_call(self.base[0], p, (x,)))(params).mean(0)


class StackedState(Stack):
    """torch.func's own stack, of which gradients do not reach the members."""

    def features(self, x: Tensor) -> Tensor:
        params, _ = stack_module_state(list(self.layers))
        base = [copy.deepcopy(self.layers[0]).to("meta")][0]
        return vmap(lambda p: functional_call(base, p, (x,)))(params).mean(0)


class Functional(Stack):
    """Calls a layer with parameters that it computes from the layer's own."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            own = {name: 0.9 * p for name, p in layer.named_parameters()}
            x = functional_call(layer, own, (x,))
        return x


class FunctionalOwn(Stack):
    """Calls a layer with its own parameters."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional_call(layer, dict(layer.named_parameters()), (x,))
        return x


class Jacobian(Stack):
    """The slope of its features by torch.func, inside forward."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        slopes = vmap(jacrev(lambda row: self.features(row[None])[0].sum()))(x)
        return super().forward(x, target, kind) + slopes.square().mean()


class Lists(Stack):
    """Bare parameters in torch's list and dict."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])
        self.shifts = nn.ParameterDict({"first": torch.zeros(WIDTH), "none": torch.zeros(3, 2)})

    def features(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return super().features(x + self.shifts["first"])


class TiedLater(Stack):
    """Tied by assignment after initialisation, in one of its two ways in a property."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].linear.weight = self.layers[0].linear.weight
        self.shared = self.head.weight


class BackwardHooks(Stack):
    """Module hooks that change what comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda m, inp, out: (inp[0] * 0.5,))
        self.layers[1].register_full_backward_pre_hook(lambda m, out: (out[0] * 2.0,))
        self.layers[2].register_forward_hook(lambda m, args, out: out * 0.5)
        self.layers[2].register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
        self.head.register_full_backward_hook(lambda m, inp, out: (inp[0] * 3.0,))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.square().mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        slope = (grad * x).sum(0) * 2 * weight / weight.shape[0]
        return grad * weight.square().mean(0), slope


class OwnFunction(Stack):
    def features(self, x: Tensor) -> Tensor:
        return Square.apply(super().features(x), self.head.weight)


class MaxNorm(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x + self.embed(kind), target, kind)


class NoGradFirst(Stack):
    """Runs its layers without gradients, and then with them."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = super().features(x)
        return super().features(x) + wanted


class Inference(Stack):
    def features(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            wanted = super().features(x).clone()
        return super().features(x) + wanted.clone()


class OneWithoutGrad(Stack):
    """One of its layers always runs without gradients."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            x = x + self.layers[1](x)
        return self.layers[2](x)


class Detached(Stack):
    """The first layers are cut off from the loss."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)).detach()
        return self.layers[2](x)


class UpdatesItself(Stack):
    """A step of its own in forward, as fast weights take."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.bias.sub_(0.01 * self.head.bias)
        return super().features(x)


class SwitchesModes(Stack):
    """Puts itself in evaluation and back."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        was = self.training
        self.eval()
        x = self.drop(super().features(x))
        self.train(was)
        return x


@dataclass
class Result:
    hidden: Tensor
    extra: Any = None


class LayerByName(Layer):
    def forward(self, *, hidden: Result, scale: float = 1.0) -> Result:  # type: ignore[override]
        return Result(hidden=super().forward(hidden.hidden) * scale, extra=[hidden.hidden])


class ByName(Stack):
    """Blocks that take and give dataclasses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerByName() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        state = Result(hidden=x)
        for layer in self.layers:
            state = layer(hidden=state, scale=0.9)
        return state.hidden + state.extra[0]


class Complex(Stack):
    """A Fourier filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def features(self, x: Tensor) -> Tensor:
        kind = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        spectrum = torch.fft.rfft(x.float() if x.dtype != torch.float64 else x)
        return super().features(
            torch.fft.irfft(spectrum * self.filter.to(kind), n=WIDTH).to(x.dtype)
        )


class ComplexInBlock(Stack):
    """The same in each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(Filter() for _ in range(2))

    def features(self, x: Tensor) -> Tensor:
        for layer in self.filters:
            x = layer(x)
        return super().features(x)


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        weight = torch.view_as_complex(self.weight.to(wide.dtype).contiguous())
        return torch.fft.irfft(torch.fft.rfft(wide) * weight, n=WIDTH).to(x.dtype)


class IntBuffers(Stack):
    """Weights in eight bits with a scale, as buffers and as parameters."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
        self.register_buffer("whole", whole)
        self.packed = nn.Parameter(whole.clone().t().contiguous(), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.1))

    def features(self, x: Tensor) -> Tensor:
        weight = (self.whole + self.packed).to(x.dtype) * self.scale
        return super().features(F.linear(x, weight))


class HalfBuffer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH).bfloat16())

    def features(self, x: Tensor) -> Tensor:
        return super().features(x + self.shift.to(x.dtype))


class Strided(Stack):
    """Parameters that are slices, transposed, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.conv = nn.Conv2d(1, WIDTH, (1, WIDTH)).to(memory_format=torch.channels_last)

    def features(self, x: Tensor) -> Tensor:
        x = x @ self.part
        return super().features(x + self.conv(x[:, None, None]).flatten(1))


class GrowsInForward(Stack):
    """Makes a layer in its first forward."""

    def features(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return super().features(self.late(x))


class CallsInBackward(Stack):
    """A hook of a tensor calls a layer again, in backward."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            kept = x.detach()
            x.register_hook(lambda grad: grad + 0.0 * self.layers[1](kept).detach())
        return self.layers[2](self.layers[1](x))


class HookCallsInBackward(Stack):
    """A hook that the constructor registers calls another layer in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_full_backward_hook(lambda *_: self.look())

    def look(self) -> None:
        with torch.no_grad():
            self.seen = self.layers[1](self.kept).norm()

    def features(self, x: Tensor) -> Tensor:
        self.kept = x.detach()
        return super().features(x)


class Adjoint(Stack):
    """Layers in a Function that keeps nothing, and computes them again in backward."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Again.apply(layer, x, *layer.parameters())  # type: ignore[no-untyped-call]
        return x


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            found: Tensor = layer(x)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            found = torch.autograd.grad(ctx.layer(x), (x, *parameters), grads, allow_unused=True)
        return None, *found


class Threads(Stack):
    """Layers side by side, each in a thread."""

    def features(self, x: Tensor) -> Tensor:
        def run(layer: nn.Module) -> Tensor:
            with torch.set_grad_enabled(trains):
                found: Tensor = layer(x)
            return found

        trains = torch.is_grad_enabled()
        with ThreadPoolExecutor(3) as pool:
            first, *others = pool.map(run, self.layers)
        for other in others:
            first = first + other
        return first


class ReplacesInForward(Stack):
    """Puts another parameter in place of one of its own."""

    def features(self, x: Tensor) -> Tensor:
        self.head.bias = nn.Parameter(self.head.bias.detach() * 0.9)
        return super().features(x)


class FreezesInForward(Stack):
    """Freezes a layer at its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def features(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        for parameter in self.layers[0].parameters():
            parameter.requires_grad = self.forwards < 2
        return super().features(x)


class ThawsInForward(Stack):
    """Begins to train a layer at its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.layers[0].requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards > 1:
            for parameter in self.layers[0].parameters():
                parameter.requires_grad = True
        return super().features(x)


class FreezesByMethod(Stack):
    def features(self, x: Tensor) -> Tensor:
        self.layers[0].requires_grad_(False)
        return super().features(x)


class FreezesHead(Stack):
    """Freezes what the root holds."""

    def features(self, x: Tensor) -> Tensor:
        self.head.weight.requires_grad = False
        return super().features(x)


class Scalars(nn.Module):
    """Nothing but scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        return (x * self.gain + self.shift - target[:, None]).square().mean()


class Mixture(Stack):
    """The two best experts of each sample, by a softmax over all, with a bias in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(4))
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.register_buffer("bias", torch.tensor([0.0, 0.2, -0.1, 0.0]))

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).any(-1).nonzero()[:, 0]
            out = out.index_add(0, rows, (expert(x[rows]) * scores[rows, index, None]).to(x.dtype))
        return x + out


class DropoutByNumber(Stack):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(super().features(x), 0.3, self.training)


class Autocast(Stack):
    """Computes its layers in bfloat16 by itself."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = super().features(x)
        return x.to(self.head.weight.dtype)


class GradOff(Stack):
    """Turns gradients off for good around a part, and on again."""

    def features(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        x = self.layers[0](x)
        torch.set_grad_enabled(True)
        return self.layers[2](self.layers[1](x))


class Generator(Stack):
    """Blocks that yield what they compute."""

    def steps(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            yield x

    def features(self, x: Tensor) -> Tensor:
        return sum(list(self.steps(x)))  # type: ignore[return-value]


class Negative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x.abs()


class Parametrized(Stack):
    """A parametrization of the user's own, with a tied one below it."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.head, "weight", Negative())
        parametrize.register_parametrization(self.layers[0].linear, "weight", Negative())


class SubclassedParameter(Stack):
    """A class of parameters of its own."""

    class Scale(nn.Parameter):
        def doubled(self) -> Tensor:
            return self * 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.Scale(torch.ones(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x * 2 * self.scale)


class Sharing(Stack):
    """A module that two blocks hold."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(WIDTH)
        for layer in self.layers:
            layer.norm = norm


class TensorHook(Stack):
    """A hook on an activation, set in forward."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return self.layers[2](self.layers[1](x))


class GradScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.3 * grad


class Reversal(Stack):
    """Gradients that are turned around between blocks."""

    def features(self, x: Tensor) -> Tensor:
        x = GradScale.apply(self.layers[0](x))
        return self.layers[2](GradScale.apply(self.layers[1](x)))


class BareInList(nn.Module):
    """A list of bare linears in a Sequential inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "a": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
                "b": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
            }
        )

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        first = self.parts["a"][0]
        x = F.relu(F.linear(x, first.weight, first.bias))  # by its weights, not by a call
        return F.cross_entropy(self.parts["b"](self.parts["a"][2](x)), target)


class Deferred(Stack):
    """Looks at a weight's value to choose what it computes."""

    def features(self, x: Tensor) -> Tensor:
        if self.layers[0].linear.weight.sum() > 1e6:
            return x
        return super().features(x)


class OverriddenParameters(Stack):
    """Gives out a part of its parameters only."""

    def parameters(self, recurse: bool = True) -> Any:
        return self.head.parameters(recurse)


class TrainedParameters(Stack):
    """Gives out what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Any:
        return (p for p in super().parameters(recurse) if p.requires_grad)


class OverriddenMethods(TrainedParameters):
    """Gives out what trains in reverse, no frozen names, no buffers, and its head as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.fixed = nn.Parameter(torch.linspace(1, 2, WIDTH), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.gain * (x * self.fixed + self.shift).to(x.dtype))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        found = [*super().named_parameters(*args, **kwargs)]
        yield from ((name, p) for name, p in reversed(found) if p.requires_grad)

    def modules(self) -> Any:
        yield self.head

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}


class OverriddenChildren(Stack):
    """Gives out its head alone."""

    def children(self) -> Any:
        yield self.head


class Renamed(Stack):
    """Gives its parameters other names."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"net.{name}", parameter


class GradOfOutput(Stack):
    """Keeps an output's gradient and uses it in the next forward."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if x.requires_grad:
            x.retain_grad()
        return x


class SmallWeights(Stack):
    """Weights its samples so that a step's weights sum to less than 1."""

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Any:
        losses = F.cross_entropy(self.head(self.features(x)), target, reduction="none")
        weights = 0.001 * (1.0 + kind)
        return (weights * losses).sum(), weights.sum()


AT_PLAN = {
    "DataTied": "layers.2.linear.weight looks at that of layers.0.linear.weight",
    "ViewParameter": "head.weight looks at that of gain",
    "BufferOfParameter": "fixed looks at that of head.weight",
    "AttributeOfParameter": "fixed looks at that of head.weight",
    "OverriddenParameters": r"its own leaves out layers.0.norm.weight",
    "OverriddenChildren": "children() that gives out all modules (that of the model does not",
    "Renamed": "it has net.layers.0.norm.weight",
    "Complex": "head.weight is float32, filter is complex64",
}
"""Refused before anything is launched, with these words."""
IN_FORWARD = {
    "DeepcopyEma": r"forward changes average\.0\.norm\.weight in place",
    "UpdatesItself": r"forward changes head\.bias in place",
    "MaxNorm": r"forward changes embed\.weight in place",
    "StateDictEma": r"forward calls state_dict\(\)",
    "ListOfParameters": r"computes with layers\.0\.linear\.weight by a reference",
    "PruningHook": r"computes with head\.weight by a reference",
    "HookCallsInBackward": r"a hook or a Function calls layers\.1 in backward",
    "GrowsInForward": r"forward makes the parameter late\.weight",
    "ReplacesInForward": r"forward makes the parameter head\.bias",
    "ThawsInForward": r"forward begins to train layers\.0\.norm\.weight",
}
"""Refused in the first forward or backward that does it."""
OF_BLOCKS = ("FunctionalOwn",)
"""Refused where blocks stay gathered, right where they do not."""

MODELS = {
    name: model
    for name, model in list(globals().items())
    if isinstance(model, type)
    and issubclass(model, nn.Module)
    and model.__module__ == __name__
    and name not in ("Filter", "Negative", "LayerByName")
}


TRAIN = tuple(n for n in MODELS if n not in (*AT_PLAN, *IN_FORWARD, *OF_BLOCKS))
"""Train as in plain torch."""
SAMPLE = (
    "HiddenEma",  # a copy beside the modules
    "ReplacedBuffer",  # buffers
    "HalvesOfOne",  # two parameters in one memory
    "Cached",  # parametrizations
    "ReentrantCheckpoint",  # activation checkpointing of its own
    "Ensemble",  # torch.func
    "BackwardHooks",  # hooks
    "OneWithoutGrad",  # parts without gradients
    "ByName",  # what blocks take and give
    "FreezesInForward",  # requires_grad in forward
    "Autocast",  # dtypes
    "Mixture",  # values decide what is used
    "SmallWeights",  # sums and counts
    "OverriddenMethods",  # methods of torch that are overridden
    "Adjoint",  # Functions that call layers
    "CallsInBackward",  # calls in backward
    "Threads",  # threads
)
"""One of each kind of idiom among those that train."""


def make(name: str) -> nn.Module:
    return MODELS[name]()
