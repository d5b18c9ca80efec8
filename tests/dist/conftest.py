"""What other test modules know under this name."""

from tests.running import SMALL, Colotrain, Result

__all__ = ["SMALL", "Colotrain", "Result"]
