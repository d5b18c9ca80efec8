"""Random draws of a user's dataset, as a function of the run's seed and a sample's position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_draws(seed: int, position: int) -> None:
    """Seed the generators that a dataset may draw from: torch's for the CPU, Python's, numpy's."""
    first, second = np.random.SeedSequence([seed, position]).generate_state(2)
    torch.default_generator.manual_seed(int(first) << 32 | int(second))
    random.seed(int(first))
    np.random.seed(second)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Afterwards these generators continue as if nothing had been drawn."""
    before = generators()
    try:
        yield
    finally:
        set_generators(before)


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
