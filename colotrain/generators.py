"""The random generators that users' code draws from: torch's, Python's and numpy's.

What they draw depends on a seed and on a name or a sample's position alone, not on world size,
plugin or order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colotrain.torch_internals import without_modes


def generator_of(name: str, *, seed: int) -> torch.Generator:
    """The generator of one parameter's initial values, on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def seed_all(seed: int) -> None:
    """Seed all generators, those of devices too."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_draws(seed: int, position: int) -> None:
    """Seed the generators that a dataset may draw from for a sample: those of the host."""
    first, second = np.random.SeedSequence([seed, position]).generate_state(2)
    torch.default_generator.manual_seed(int(first) << 32 | int(second))
    random.seed(int(first))
    np.random.seed(second)


def of_host() -> tuple[Any, ...]:
    """Return the state of the host's generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def set_on_host(state: tuple[Any, ...]) -> None:
    """Set the host's generators to a state that `of_host` returned."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@contextmanager
def kept() -> Iterator[None]:
    """Afterwards the host's generators continue as if nothing had been drawn."""
    before = of_host()
    try:
        yield
    finally:
        set_on_host(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators inside the context, alike on every rank; afterwards as `kept`."""
    with kept():
        seed_all(seed)
        yield


def drawn_on_host() -> tuple[Any, ...]:
    """Return what is equal to an earlier answer if nothing was drawn on the host between them.

    Where tensors are fake, torch's state would be a fake tensor.
    """
    with without_modes():
        own, python, numpy = of_host()
        return own.numpy().tobytes(), python, repr(numpy)


def states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators as tensors that a checkpoint can hold."""
    own, (_, numbers, gauss), kind = of_host()
    state = {
        "": own,
        ".python": torch.tensor(numbers),
        ".python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if kind["bit_generator"] == "MT19937":
        inner = [*kind["state"]["key"].tolist(), kind["state"]["pos"], kind["has_gauss"]]
        state[".numpy"] = torch.tensor(inner)
        state[".numpy_gauss"] = torch.tensor([kind["gauss"]], dtype=torch.float64)
    if device.type == "cuda":
        state[".cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_states(device: torch.device, own: dict[str, Tensor]) -> None:
    """Set this rank's generators to a state that `states` returned."""
    torch.set_rng_state(own[""])
    has_gauss, gauss = own[".python_gauss"].tolist()
    random.setstate((3, tuple(own[".python"].tolist()), gauss if has_gauss else None))
    if ".numpy" in own:
        *key, pos, has_gauss = own[".numpy"].tolist()
        np.random.set_state(
            ("MT19937", np.array(key, np.uint32), pos, has_gauss, own[".numpy_gauss"].item())
        )
    if device.type == "cuda" and ".cuda" in own:
        torch.cuda.set_rng_state(own[".cuda"], device)
