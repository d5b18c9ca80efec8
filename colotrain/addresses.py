"""Addresses of this machine, and the sockets at which a run's processes listen."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import socket
from typing import Any

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def plain_address(address: str) -> str:
    """Return `10.0.0.1` for the IPv4-mapped form of an IPv6 socket, `::ffff:10.0.0.1`."""
    return address.removeprefix("::ffff:")


def network_of(address: str) -> str:
    """Return what counts as one peer: an IPv4 address, or the /64 of one that has many."""
    plain = plain_address(address).partition("%")[0]
    if ":" not in plain:
        return plain
    return str(ipaddress.ip_network((plain, 64), strict=False))


def address_towards(host: str) -> str:
    """Return this machine's address on the interface that reaches `host`; empty if none does."""
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(host, None)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    return ""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: on loopback if `host` is loopback, otherwise on every address.

    The host name is not resolved: a machine may know itself by another address than its peers do.
    """
    if is_loopback(host):
        return socket.create_server((LOOPBACK, port))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on this address alone; if it is not this machine's, on all."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if address:
            return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return listen("", port)


def serve_store(listener: socket.socket, *, timeout: datetime.timedelta) -> Any:
    """Return a store of torch's that this process serves at this socket; torch's own would listen
    at every address."""
    from torch.distributed import TCPStore

    here, port = listener.getsockname()[:2]
    return TCPStore(
        LOOPBACK if here in ("::", "0.0.0.0") else here,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
