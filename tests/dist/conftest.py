"""What other modules know under this name; workers without a launcher are forked warm, too."""

import pytest

from tests.processes import launchers
from tests.running import SMALL, Colotrain, Result
from tests.warm import take_workers_from

__all__ = ["SMALL", "Colotrain", "Result"]


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> None:
    """Processes that tests start by multiprocessing's forkserver have imported what tests do."""
    take_workers_from(launchers())
