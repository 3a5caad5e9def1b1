"""Free TCP ports on loopback."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ephemeral ports of the system, so that no connection of another test takes the port before the server does.
# Processes of one run start far from each other.
_FIRST, _COUNT = 12_000, 20_000
_next = itertools.count(os.getpid() * 7919)


def find_free_port() -> int:
    """Return a port that is not in use and was not returned in this process before."""
    for number in _next:
        port = _FIRST + number % _COUNT
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("the counter never ends")
