"""A link between two processes that a test can stall or cut: a proxy for TCP or Unix sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Sequence

Connect = Callable[[], socket.socket]
"""Opens a connection to the other end. Raises OSError."""

_CHUNK_BYTES = 65_536
_HEALTH_TIMEOUT_S = 1.0


class FaultyLink:
    """Forwards connections of a listening socket. Both directions of a connection share the fate of the link."""

    def __init__(self, listener: socket.socket, connect: Connect) -> None:
        self._listener = listener
        self._connect = connect
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._is_cut = self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones until `repair`."""
        self._is_cut = True
        self._close_connections()

    def stall(self) -> None:
        """Deliver nothing until `repair`, without closing a connection."""
        self._flows.clear()

    def repair(self) -> None:
        self._is_cut = False
        self._flows.set()

    def close(self) -> None:
        self._is_closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._flows.wait()
        if self._is_cut:
            near.close()
            return
        try:
            far = self._connect()
        except OSError:
            near.close()
            return
        with self._lock:
            self._sockets |= {near, far}
        back = threading.Thread(target=self._forward, args=(far, near), daemon=True)
        back.start()
        self._forward(near, far)
        back.join()
        with self._lock:
            self._sockets -= {near, far}
        near.close()
        far.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flows.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _close_connections(self) -> None:
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def connect_to_healthy(ports: Sequence[int]) -> socket.socket:
    """Connect to the first API process that answers, as a load balancer does. Raises OSError without one."""
    for port in ports:
        check = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_TIMEOUT_S)
        try:
            check.request("GET", "/healthz")
            if check.getresponse().status == http.client.OK:
                return socket.create_connection(("127.0.0.1", port))
        except (OSError, http.client.HTTPException):
            continue
        finally:
            check.close()
    raise ConnectionRefusedError("no API process answers")
