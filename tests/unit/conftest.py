"""Fixtures of several tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from colotrain.addresses import listen
from colotrain.launch.copy_keeper import CopyKeeper


@pytest.fixture
def handles() -> Iterator[list[int]]:
    """Files of a rank, and of the launcher whose keeper it is."""
    made = [os.memfd_create(f"test{n}") for n in range(2)]
    yield made
    for handle in made:
        os.close(handle)


@pytest.fixture
def keeper(handles: list[int]) -> Iterator[CopyKeeper]:
    files = SimpleNamespace(handles=handles[1:])
    made = CopyKeeper(listen("127.0.0.1", 0), secret=lambda: "secret", files=files)  # type: ignore[arg-type]
    yield made
    made.close()
