"""Random numbers that depend on seed and name alone: never on world size, plugin or order."""

from __future__ import annotations

import hashlib

import torch


def generator_of(name: str, *, seed: int) -> torch.Generator:
    """The generator of one parameter's initial values, on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
