"""State of the random number generators a forward may use: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colotrain.torch_internals import without_modes


def states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators as tensors that a checkpoint can hold."""
    _, numbers, gauss = random.getstate()
    kind: dict[str, Any] = np.random.get_state(legacy=False)
    state = {
        "": torch.get_rng_state(),
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


def drawn_on_host() -> tuple[Any, ...]:
    """Return the state of the host's generators: an equal one tells that nothing was drawn.

    Where tensors are fake, torch's state would be a fake tensor.
    """
    with without_modes():
        own = torch.get_rng_state().numpy().tobytes()
    return own, random.getstate(), repr(np.random.get_state(legacy=False))
