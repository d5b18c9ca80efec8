"""Loading with transformers, and asking the Hugging Face Hub nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def offline() -> Iterator[None]:
    """Ask the Hub nothing meanwhile: a model's directory may name others, as a backbone."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
