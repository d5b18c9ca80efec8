"""The optimizers that `optim.name` may name, and what the planner has to know of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What is the same for every run with it. The class is `engine.optim.optimizers`' to choose."""

    state_tensors: int
    """Numbers per trained element that are kept between steps."""
    num_betas: tuple[int, ...] = ()
    """How many values `optim.betas` may have; empty: they are not used."""
    betas_are: str = "two numbers"
    betas_example: str = "[0.9,0.95]"
    momentum_beta: int | None = None
    """Which of the betas is a momentum, as `optim.momentum` sets it."""
    momentum_is_optional: bool = False
    """Without a first beta above zero it keeps nothing."""
    counts_steps: bool = False
    """In a tensor of each parameter."""
    begins_with_zeros: bool = False
    """Zeroed state is what a first step would begin with."""
    is_elementwise: bool = False
    """torch's AdamW or SGD keeps the same state, so that torch's tracker can play it."""


OPTIMIZERS = {
    "adamw": Optimizer(
        state_tensors=2,
        num_betas=(2,),
        counts_steps=True,
        begins_with_zeros=True,
        is_elementwise=True,
    ),
    "sgd": Optimizer(
        state_tensors=1,
        num_betas=(1, 2),
        betas_are="SGD's momentum",
        betas_example="[0.9]",
        momentum_beta=0,
        momentum_is_optional=True,
        begins_with_zeros=True,
        is_elementwise=True,
    ),
    "lion": Optimizer(state_tensors=1, num_betas=(2,), is_elementwise=True),
    # At most: AdamW's, of embeddings; a matrix has one.
    "muon": Optimizer(state_tensors=2, num_betas=(2,), momentum_beta=1),
    "adafactor": Optimizer(state_tensors=0),
}
OF_THE_USERS = Optimizer(state_tensors=2)
"""What is assumed, at most, of `package.module:Class`."""


def optimizer_of(name: str) -> Optimizer:
    return OPTIMIZERS.get(name, OF_THE_USERS)
