"""What ranks tell one another through torch's store, signed: the store does not know who writes.

Its port is open to whoever reaches the machine. The round's key comes from node 0's launcher, over
connections that strangers cannot make (`connections`), and is another one in each round, so that
what was written in one says nothing in the next.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist

from colotrain.errors import ColotrainError
from colotrain.spec.elastic import ROUND_KEY
from colotrain.torch_internals import own_store

FIRST_POLL_S, LONGEST_POLL_S = 0.02, 0.5
NOTHING = "-"
"""What the store returns where there is no text; no note is that short."""


@cache
def round_key() -> str:
    """Return the round's key, and take it from the environment, which children of a rank inherit.

    Call it before code of the user's runs. One process that no launcher has started makes a key of
    its own; `ColotrainError` where there are several.
    """
    key = os.environ.pop(ROUND_KEY, "")
    if not key and dist.get_world_size() > 1:
        problem = f"{ROUND_KEY} is not set: ranks trust no notes of one another without their key"
        raise ColotrainError(problem, "start them by `colotrain run`")
    return key or secrets.token_hex(32)


class Notes:
    """Signed texts in the process group's store, over a connection of their own."""

    def __init__(self, store: Any = None, key: str | None = None) -> None:
        self.store = own_store() if store is None else store
        self.key = (round_key() if key is None else key).encode()

    def _sign(self, name: str, text: str) -> str:
        # names have no zeros, so that no two pairs are signed alike
        return hmac.digest(self.key, f"{name}\0{text}".encode(), "sha256").hex()

    def write(self, name: str, text: str) -> None:
        self.store.set(name, self._sign(name, text) + text)

    def read(self, name: str) -> str | None:
        """Return the text that a rank of this round wrote; None where none has yet."""
        # `get` would wait for a note that a stranger deletes after `check`; this writes nothing
        found = bytes(self.store.compare_set(name, NOTHING, "")).decode(errors="replace")
        signature, text = found[:64], found[64:]
        # bytes: what a stranger wrote may be no ASCII, which would be a TypeError
        is_signed = hmac.compare_digest(signature.encode(), self._sign(name, text).encode())
        return text if is_signed else None

    def wait(self, name: str, *, is_over: Callable[[], bool]) -> str | None:
        """Return the text once a rank has written it; None where the wait `is_over` first.

        Pauses grow, as a thousand ranks may ask one store.
        """
        pause_s = FIRST_POLL_S
        while (text := self.read(name)) is None and not is_over():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
        return text
