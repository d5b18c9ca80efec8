"""Mistakes to plant in a run: the harness must say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@contextlib.contextmanager
def no_wait_stream() -> Iterator[None]:
    """Streams do not wait for one another."""
    with mock.patch.object(torch.cuda.Stream, "wait_stream"):
        yield


@contextlib.contextmanager
def no_synchronize() -> Iterator[None]:
    """The host does not wait for streams."""
    with mock.patch.object(torch.cuda.Stream, "synchronize"):
        yield


@contextlib.contextmanager
def batch_stays() -> Iterator[None]:
    """Batches are not brought to the device."""
    from colotrain.engine import loop

    with mock.patch.object(loop, "to_device", lambda batch, device: batch):
        yield
