"""The optimizers that `optim.name` may name, and the properties of each that the planner uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer in any run; `engine.optim.optimizers` chooses its class."""

    state_tensors: int
    """State tensors of the parameter's shape that are kept between steps."""
    num_betas: tuple[int, ...] = ()
    """Numbers of values that `optim.betas` may have; empty where betas are not used."""
    betas_are: str = "two numbers"
    betas_example: str = "[0.9,0.95]"
    momentum_beta: int | None = None
    """Index of the beta that `optim.momentum` sets; None where the optimizer has no momentum."""
    momentum_is_optional: bool = False
    """Whether no state is kept unless the first beta is above zero."""
    counts_steps: bool = False
    """Whether a further tensor per parameter counts its steps."""
    begins_with_zeros: bool = False
    """Whether a first step begins from zeroed state."""
    is_elementwise: bool = False
    """Whether torch's AdamW or SGD has the same state; torch's memory tracker runs it instead."""


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
    # The most: embeddings have AdamW's two; matrices have one.
    "muon": Optimizer(state_tensors=2, num_betas=(2,), momentum_beta=1),
    "adafactor": Optimizer(state_tensors=0),
}
ELEMENTWISE = tuple(name for name, known in OPTIMIZERS.items() if known.is_elementwise)
CUSTOM_OPTIMIZER = Optimizer(state_tensors=2)
"""Properties assumed of a user's optimizer, `package.module:Class`; its state may be smaller."""


def optimizer_of(name: str) -> Optimizer:
    return OPTIMIZERS.get(name, CUSTOM_OPTIMIZER)
