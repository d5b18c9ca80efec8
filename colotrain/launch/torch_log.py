"""torch's own messages about workers, in a file of the launch instead of the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of the agent, and of the functions that start and end its workers."""


class _File(logging.FileHandler):
    """A file that a full disk leaves incomplete."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # named by logging
        pass


@contextmanager
def torch_logs_to(file: Path) -> Iterator[None]:
    """Write the messages of `LOGGERS` to `file`, and nowhere else, until the end of the block."""
    handler = _File(file, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.propagate = propagates
            logger.removeHandler(handler)
        handler.close()
