"""A case of the engine on the simulated device, as told to the processes that run it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the engine."""

    name: str
    words: tuple[str, ...]
    on: str = "cuda"
    """The simulated device, or cpu."""
    looks: bool = True
    """Keep the gradients, for which the host waits."""
    limit: int | None = None
    """Bytes of the device's memory."""
    run: str = ""
    """The run that this case goes on with; by default one of its own."""
    plant: str = ""
    """A mistake to make: the name of a function of `plants`."""
    attempt: int = 0
