"""AdamW of parameters in bfloat16 that loses no small update: stochastic rounding, Kahan sums.

bfloat16 has 8 significant bits: rounded to the nearest number, an update of less than half of the
last place changes nothing, however often it comes. Here an update is computed in float32. What is
stored in bfloat16 is rounded up or down at random, with the probabilities that make the mean right
(Gupta et al. 2015); or the parameter is rounded to the nearest number and what that takes off is
kept beside it (Kahan 1965), as Zamirai et al. 2020 train in 16 bits.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.optim.base import OverShards, adamw_

ELEMENTS_AT_ONCE = 1 << 16
"""Elements that are in float32 at a time; with their random bits they stay in a processor's
cache."""
LAST_16 = 0xFFFF
"""The bits of a float32 that a bfloat16 lacks."""


class RoundedAdamW(OverShards):
    """torch's AdamW with its state in the parameters' dtypes, for parameters in bfloat16.

    Random bits are a function of the seed, the parameter's name and own step, and the element's
    index in the whole parameter, so that ranks and resumes change nothing. Moments in bfloat16 are
    rounded at random with Kahan sums, too: the nearest number would keep a second moment from
    falling where its decay rate is above 0.998.
    """

    def __init__(self, params: Any, *, compensates: bool, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.compensates = compensates

    def _update(self) -> None:
        for parameter, grad, state, group in self._updated():
            if parameter.dtype == torch.bfloat16:
                self._update_halves(parameter, grad, state, group)
            else:
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                adamw_(parameter, grad, mean, square, state["step"].item(), group)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
        if self.compensates and parameter.dtype == torch.bfloat16:
            state["compensation"] = torch.zeros_like(parameter)

    def _update_halves(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update a parameter in bfloat16, some elements at a time."""
        step, row = state["step"].item(), math.prod(parameter.shape[1:])
        first = self.layout.first_row(parameter) * row
        key = key_of(self.layout.seed, self.layout.name(parameter), int(step))
        values, gradients = parameter.view(-1), grad.reshape(-1)
        means, squares = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        rests = state["compensation"].view(-1) if self.compensates else None
        for start in range(0, parameter.numel(), ELEMENTS_AT_ONCE):
            piece = slice(start, min(start + ELEMENTS_AT_ONCE, parameter.numel()))
            mean, square = means[piece].float(), squares[piece].float()
            exact = values[piece].float()
            if rests is not None:
                exact += rests[piece]
            adamw_(exact, gradients[piece], mean, square, step, group)
            bits = random_bits(key, first + start, len(exact), exact.device)
            means[piece] = rounded(mean, (bits >> 16) & LAST_16)
            squares[piece] = rounded(square, (bits >> 32) & LAST_16)
            if rests is None:
                values[piece] = rounded(exact, bits & LAST_16)
            else:
                values[piece] = exact
                rests[piece] = rounded(exact.sub_(values[piece]), bits & LAST_16)


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 `values` to one of both neighbours in bfloat16, told by 16 random bits each.

    Infinities stay as they are by themselves; a NaN of a GPU has all its bits set.
    """
    raised = (values.view(torch.int32) + bits.int()).bitwise_and_(~LAST_16)
    return torch.where(values.isnan(), values, raised.view(torch.float32))


def key_of(seed: int, name: str, step: int) -> int:
    """Return the key of a parameter's random bits in a step, a signed number of 64 bits."""
    digest = hashlib.sha256(f"{seed}:{step}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_bits(key: int, first: int, num: int, device: torch.device) -> Tensor:
    """Return `num` whole numbers of 64 random bits, from number `first` of the sequence of `key`.

    SplitMix64 (Steele et al. 2014): each is a function of the key and of its place alone.
    """
    z = torch.arange(first + 1, first + 1 + num, device=device, dtype=torch.int64)
    z.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    z ^= _shifted(z, 30)
    z.mul_(_signed(0xBF58476D1CE4E5B9))
    z ^= _shifted(z, 27)
    z.mul_(_signed(0x94D049BB133111EB))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift to the right as an unsigned number."""
    return (z >> by).bitwise_and_((1 << 64 - by) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64)
