"""What colotrain has found out about a model: kept with the model, and copied with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colotrain.models.outputs import TargetRule

FACTS = "_colotrain"


@dataclass(slots=True, kw_only=True)
class ModelFacts:
    """Types of other modules are `Any`: they import this one."""

    init_called: bool = True
    """Whether the constructor called `init_weights()`, where it was watched."""
    was_compiled: bool = False
    """Whether `model.target` returned it compiled."""
    rule: TargetRule = field(default_factory=TargetRule)
    """What its loss is a mean over."""
    objective: Any = None
    """The `Objective` that makes the loss of its output; None: forward returns the loss."""
    task: Any = None
    """The `Task` that a model of `model.hf` is for; None where that is not known."""
    sources: Any = None
    """The `Sources` of its tensors in the files of `model.hf`; None for other models."""
    head: Any = None
    """The `ChunkedHead`, where its output embeddings compute the loss without all logits."""
    balancing_loss: Callable[..., Any] | None = None
    """transformers' auxiliary loss of its routers."""
    layers_run: Callable[[], int] | None = None
    """Number of layers that a forward runs on this pipeline stage; None: all of them."""
    sees_images: Callable[[], bool] | None = None
    """Whether a forward on this pipeline stage reads images; None: it does."""
    whole_sequences: str = ""
    """Why ranks may not divide the samples of a model of transformers; "" where they may."""
    divide: Callable[[nn.Module], None] | None = None
    """What is done to the model where ranks divide its sequences, beside `sequence_shard`."""
    sees_all: bool = False
    """Whether it is an encoder of transformers, whose tokens attend to those behind them."""
    gathers_outputs: bool = False
    """Whether its forward returns outputs of whole samples although ranks divide them."""
    gradients: Any = None
    """The engine's `GradientState`, once the model is sharded."""


def facts_of(model: nn.Module) -> ModelFacts:
    """Return the facts about `model`, which may be changed; a model without any gets its own."""
    facts: ModelFacts = model.__dict__.setdefault(FACTS, ModelFacts())
    return facts
