"""What a call of the Python API leaves as the script has it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept(*, environment: bool = False) -> Iterator[None]:
    """Put back Python's random numbers, from which `rich` draws when it is imported.

    With `environment`, put back its variables, too: those of a run are for its ranks.
    """
    numbers, variables = random.getstate(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(numbers)
        if environment:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
