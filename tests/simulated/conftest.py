"""The simulated device is compiled once per test session, and skipped where that cannot be."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from tests.simulated.build import compile_guard, compiler


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that a worker loads before torch."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler (c++, g++ or clang++)")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs torch's CPU build: this one has a device of its own")
    known = importlib.metadata.version("torch").split("+")[0]
    if not known.startswith("2.13."):
        pytest.skip(f"is written against torch 2.13, not {known}")
    return compile_guard(tmp_path_factory.mktemp("guard"))
