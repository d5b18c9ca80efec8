"""Warnings about what runs beside a launch, which the launcher's own thread shows later."""

from __future__ import annotations

import queue
import time

from colotrain.events.event import Event
from colotrain.events.kinds import Note


class ThreadWarnings:
    """Warnings that one thread adds and another takes, as events of kind `note`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def add(self, text: str) -> None:
        fields = Note(text=f"warning: {text}").fields()
        self._waiting.put(Event(kind=Note.KIND, t=time.time(), fields=fields))

    def take(self) -> list[Event]:
        """Return the warnings that were added since the last call."""
        taken = []
        while not self._waiting.empty():
            taken.append(self._waiting.get())
        return taken
