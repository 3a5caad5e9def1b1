"""Ports of this machine."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the system deals out by itself, so that no connection of another test takes the port before the
# server that it is for; processes of one run begin far from one another.
_FIRST, _COUNT = 12_000, 20_000
_next = itertools.count(os.getpid() * 7919)


def find_free_port() -> int:
    """One that nobody listens on now, and that was not given in this process before."""
    for number in _next:
        port = _FIRST + number % _COUNT
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("without end")
