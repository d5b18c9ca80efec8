"""Errors of a rank that lost another rank of its process group, whatever was made of them since."""

from __future__ import annotations

from colotrain.errors import message_of

NCCL_WATCHDOG_MESSAGES = (
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Some NCCL operations have failed or timed out",
    "Watchdog caught collective operation timeout",
)
"""Messages of NCCL's watchdog when it aborts a rank whose collective another rank never joined."""
PEER_LOST_MESSAGES = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "Write error",
    "Timed out waiting",
    *NCCL_WATCHDOG_MESSAGES,
)
"""Messages of a rank that lost a peer of its process group."""


class PeerLost(RuntimeError):
    """A rank ended, or did not come within the timeout, while this one waited for it."""


def says_peer_lost(text: str) -> bool:
    """Whether an error's text is that of a rank that lost a peer of its process group."""
    return any(mark in text for mark in PEER_LOST_MESSAGES)


def peer_lost_in(error: BaseException | None) -> RuntimeError | None:
    """Return the collective's error that `error` is or was raised because of, if there is one.

    Code of the user's and of libraries, in which collectives run, may raise an error of its own
    instead, and so may the check of such code; nothing is wrong with the code.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:  # `raise error from error` is a circle
        if isinstance(error, RuntimeError) and _is_of_collective(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective lost a peer: libraries that read files have `Read error`s, too."""
    text = message_of(error)
    if isinstance(error, PeerLost) or any(mark in text for mark in NCCL_WATCHDOG_MESSAGES):
        return True
    return "gloo" in text and says_peer_lost(text)
