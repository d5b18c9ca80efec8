"""Random numbers that depend on seed and name alone, not on world size, plugin or order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator_of(name: str, *, seed: int) -> torch.Generator:
    """The generator of one parameter's initial values, on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def seed_all(seed: int) -> None:
    """Seed the generators that users' code draws from: torch's, Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators inside the context, alike on every rank.

    Afterwards the CPU's generators continue as if nothing had been drawn.
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
