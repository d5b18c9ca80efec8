"""What ranks tell one another through torch's store, signed: the store does not know who writes.

Its port is open to whoever reaches the machine. The round's key comes from node 0's launcher, over
connections that strangers cannot make (`connections`), and is another one in each round, so that
what was written in one says nothing in the next.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from typing import Any

from colotrain.spec.elastic import ROUND_KEY
from colotrain.torch_internals import own_store


class Notes:
    """Signed texts in the process group's store, over a connection of their own."""

    def __init__(self, store: Any = None, key: str | None = None) -> None:
        self.store = own_store() if store is None else store
        self.key = (os.environ.get(ROUND_KEY, "") if key is None else key).encode()

    def _sign(self, name: str, text: str) -> str:
        # names have no zeros, so that no two pairs are signed alike
        return hmac.digest(self.key, f"{name}\0{text}".encode(), "sha256").hex()

    def write(self, name: str, text: str) -> None:
        self.store.set(name, self._sign(name, text) + text)

    def read(self, name: str) -> str | None:
        """Return the text that a rank of this round wrote; None where none has yet."""
        if not self.store.check([name]):
            return None
        found = bytes(self.store.get(name)).decode(errors="replace")
        signature, text = found[:64], found[64:]
        # bytes: what a stranger wrote may be no ASCII, which would be a TypeError
        is_signed = hmac.compare_digest(signature.encode(), self._sign(name, text).encode())
        return text if is_signed else None

    def are_there(self, names: Sequence[str]) -> bool:
        """Whether ranks of this round have written all of them."""
        return bool(self.store.check(list(names))) and None not in map(self.read, names)
