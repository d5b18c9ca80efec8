"""A node that does not reach node 0 waits as long as the kind of failure deserves."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from colotrain.launch.membership import Membership

AGAIN, UNKNOWN = socket.gaierror(socket.EAI_AGAIN, "try"), socket.gaierror(socket.EAI_NONAME, "no")
NO_ROUTE, NO_NAME = OSError("no route to host"), UnicodeError("label empty or too long")


@pytest.mark.parametrize("error", [AGAIN, UNKNOWN, NO_ROUTE], ids=repr)
@pytest.mark.parametrize("arrived", [False, True])
def test_a_network_that_is_out_for_a_minute_ends_no_node(error: Exception, arrived: bool) -> None:
    """Neither one that has been in a round nor one that knew node 0's address alone."""
    member, failures = unreachable(arrived=arrived, resolved=True)
    Membership._on_unreachable(member, error, 60.0)
    assert not failures
    assert bool(member.state.get("regroup")) == arrived
    Membership._on_unreachable(member, error, 601.0)
    assert "is out of reach" in str(failures[0])


@pytest.mark.parametrize("error", [AGAIN, UNKNOWN, NO_NAME], ids=repr)
def test_a_name_that_never_had_an_address_is_refused_soon(error: Exception) -> None:
    member, failures = unreachable()
    Membership._on_unreachable(member, error, 9.0)
    assert not failures
    Membership._on_unreachable(member, error, 11.0)
    (refused,) = failures
    assert "node 0 at node0:29500 has no address that is known here; correct cluster.rdzv" in str(
        refused
    )


def test_a_name_that_once_had_an_address_is_waited_for() -> None:
    member, failures = unreachable()
    for error in (AGAIN, NO_ROUTE, AGAIN):
        Membership._on_unreachable(member, error, 9.0)
    Membership._on_unreachable(member, AGAIN, 60.0)
    assert not failures


def test_a_head_that_refuses_connections_has_ended() -> None:
    member, failures = unreachable(arrived=True, resolved=True)
    Membership._on_unreachable(member, ConnectionRefusedError(), 11.0)
    assert "is out of reach" in str(failures[0])


def unreachable(*, arrived: bool = False, resolved: bool = False) -> tuple[Any, list[Exception]]:
    """Return a member that does not reach node 0, and why it gives up; empty until it does."""
    failures = list[Exception]()
    member: Any = object.__new__(Membership)
    member.head, member.lost_s, member.state = ("node0", 29500), 600.0, {}
    member.refusal, member._changed = "", threading.Condition()
    member._arrived, member._resolved, member._fail = arrived, resolved, failures.append
    return member, failures
