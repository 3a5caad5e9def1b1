"""Limits of TCP connections: deadlines, a limit per address, and room for authenticated callers.

uvicorn bounds neither the time in which a header must arrive nor the number of connections. `LimitedProtocol` sets the
deadlines of one connection, and `ConnectionTable` decides which connection gives way when there are too many. A new
connection is refused only if every other one is in use by an authenticated caller. Otherwise it replaces the connection
that has waited longest without authenticating, so that half-open requests keep no caller out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from scheduler.telemetry.metrics import ConnectionEnd, record_connection_end, record_connections

HEADER_BYTES_MAX = 65_536
"""Bytes that a client may send before they complete a header or continue a body."""
ADDRESS_GRACE_S = 1.0
"""Age below which the limit per address closes no connection: its first request may not have been read yet."""
_UNAUTHENTICATED_SHARE = 4
_RESERVED_FILES = 256
_STATE_KEY = "connection"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one process.

    `connections_max` bounds all connections; a quarter of them may be unauthenticated. `per_address_max` bounds the
    unauthenticated connections of one IPv4 address or IPv6 /64 network.
    """

    connections_max: int = 10_000
    per_address_max: int = 100
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0

    @property
    def unauthenticated_max(self) -> int:
        return max(1, self.connections_max // _UNAUTHENTICATED_SHARE)


class Phase(Enum):
    """State of a connection, which determines its deadline."""

    HEADER = auto()
    BODY = auto()
    RESPONSE = auto()
    UNREAD_BODY = auto()
    """The response was sent before the body had arrived, mostly an error."""
    IDLE = auto()


class ConnectionTable:
    """The open connections of one process. Belongs to its event loop.

    `is_proxy` returns whether the limit per address does not apply to an address.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        *,
        is_proxy: Callable[[str], bool] = lambda address: False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.now_s = now_s
        self._is_proxy = is_proxy
        self._authenticated: dict[LimitedProtocol, None] = {}  # dicts keep the order of arrival
        self._unauthenticated: dict[LimitedProtocol, None] = {}
        self._by_address: dict[str, dict[LimitedProtocol, None]] = {}

    def __len__(self) -> int:
        return len(self._authenticated) + len(self._unauthenticated)

    def admit(self, connection: LimitedProtocol) -> bool:
        """Add a new connection, closing others if there are too many. Return False if it must be refused."""
        if not self._is_proxy(connection.address):
            self._make_room_for_address(connection.address_key)
        if len(self._unauthenticated) >= self.limits.unauthenticated_max:
            self._evict(self._unauthenticated, ConnectionEnd.TOTAL_LIMIT)
        if len(self) >= self.limits.connections_max:
            found = self._evict(self._unauthenticated, ConnectionEnd.TOTAL_LIMIT)
            if not found and not self._evict(self._authenticated, ConnectionEnd.TOTAL_LIMIT):
                return False
        self._unauthenticated[connection] = None
        self._by_address.setdefault(connection.address_key, {})[connection] = None
        return True

    def mark_authenticated(self, connection: LimitedProtocol) -> None:
        if connection in self._unauthenticated:
            self.remove(connection)
            self._authenticated[connection] = None

    def remove(self, connection: LimitedProtocol) -> None:
        self._authenticated.pop(connection, None)
        self._unauthenticated.pop(connection, None)
        of_address = self._by_address.get(connection.address_key, {})
        of_address.pop(connection, None)
        if not of_address:
            self._by_address.pop(connection.address_key, None)

    def close_expired(self) -> None:
        """Close the connections whose deadline is over. Call about once a second."""
        now_s = self.now_s()
        for connection in (*self._authenticated, *self._unauthenticated):
            connection.close_if_expired(now_s)
        record_connections(len(self))

    def _make_room_for_address(self, address_key: str) -> None:
        of_address = self._by_address.get(address_key, {})
        latest_s = self.now_s() - ADDRESS_GRACE_S
        while len(of_address) >= self.limits.per_address_max:
            if not self._evict(of_address, ConnectionEnd.ADDRESS_LIMIT, opened_before_s=latest_s):
                return

    def _evict(
        self, connections: Iterable[LimitedProtocol], reason: ConnectionEnd, *, opened_before_s: float = float("inf")
    ) -> bool:
        """Close the oldest connection that is not being served. Return whether there was one."""
        allows_body = connections is not self._authenticated
        for connection in connections:
            if connection.opened_at_s >= opened_before_s:
                return False
            if connection.waits_for_client(allows_body=allows_body):
                connection.end(reason)
                return True
        return False


class LimitedServerState(ServerState):
    """uvicorn's state of a server, with the table that its protocols use."""

    def __init__(self, connections: ConnectionTable) -> None:
        super().__init__()
        self.table = connections


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 connection with deadlines.

    The header timeout covers a whole header from the opening of the connection or from the first byte of a later
    request. The idle timeout restarts with each part of a body, and with each part of a response that the client reads.
    A response that the application takes long to produce, such as an event stream, has no deadline.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(server_state, LimitedServerState)
        self._table = server_state.table
        self._phase = Phase.HEADER
        self._deadline_s = self._write_deadline_s = float("inf")
        self._unparsed_bytes = 0
        self.address = self.address_key = ""
        self.opened_at_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.address = self.client[0] if self.client else ""
        self.address_key = _to_address_key(self.address)
        self.opened_at_s = self._table.now_s()
        self._enter(Phase.HEADER, self._table.limits.header_timeout_s)
        if not self._table.admit(self):
            self.end(ConnectionEnd.REFUSED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEADER, self._table.limits.header_timeout_s)
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > HEADER_BYTES_MAX and not self.transport.is_closing():
            self.end(ConnectionEnd.HEADER_SIZE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][_STATE_KEY] = self
        if self._phase is not Phase.HEADER:  # the next request of a pipeline
            self._enter(Phase.HEADER, self._table.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._enter(Phase.BODY, self._table.limits.idle_timeout_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if self._phase is Phase.BODY:
            self._enter(Phase.BODY, self._table.limits.idle_timeout_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._phase is Phase.UNREAD_BODY:
            self._enter(Phase.IDLE, self._table.limits.idle_timeout_s)
        else:
            self._enter(Phase.RESPONSE, float("inf"))
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self._phase is Phase.BODY and is_last:
            self._enter(Phase.UNREAD_BODY, self._table.limits.header_timeout_s)
        elif self._phase is Phase.RESPONSE and is_last:
            self._enter(Phase.IDLE, self._table.limits.idle_timeout_s)

    def pause_writing(self) -> None:
        self._write_deadline_s = self._table.now_s() + self._table.limits.idle_timeout_s
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_deadline_s = float("inf")
        super().resume_writing()

    def waits_for_client(self, *, allows_body: bool) -> bool:
        """Return whether the next step is the client's. An incomplete body counts if `allows_body` is set."""
        if self._write_deadline_s < float("inf"):
            return allows_body
        return self._phase is Phase.IDLE or (allows_body and self._phase is not Phase.RESPONSE)

    def close_if_expired(self, now_s: float) -> None:
        if now_s >= self._write_deadline_s:
            self.end(ConnectionEnd.IDLE_TIMEOUT)
        elif now_s >= self._deadline_s:
            if self._phase is Phase.BODY and self.flow.read_paused:  # the application is slow, not the client
                self._enter(Phase.BODY, self._table.limits.idle_timeout_s)
            else:
                is_header = self._phase in (Phase.HEADER, Phase.UNREAD_BODY)
                self.end(ConnectionEnd.HEADER_TIMEOUT if is_header else ConnectionEnd.IDLE_TIMEOUT)

    def end(self, reason: ConnectionEnd) -> None:
        """Close the connection and count the reason. A client that has begun a request is told its status."""
        self._table.remove(self)
        if self._phase is not Phase.IDLE:
            record_connection_end(reason)
        is_responding = self.cycle is not None and not self.cycle.response_complete
        if self._write_deadline_s < float("inf") or is_responding:
            self.transport.abort()
            return
        if self._phase is Phase.HEADER and (self._unparsed_bytes or reason is ConnectionEnd.REFUSED):
            self.transport.write(_RESPONSES[reason])
        self.transport.close()

    def _enter(self, phase: Phase, timeout_s: float) -> None:
        self._phase = phase
        self._deadline_s = self._table.now_s() + timeout_s


def mark_authenticated(scope: Scope) -> None:
    """Keep the request's connection when unauthenticated ones are closed."""
    connection = scope.get("state", {}).get(_STATE_KEY)
    if isinstance(connection, LimitedProtocol):
        connection._table.mark_authenticated(connection)


def raise_open_files_limit(connections_max: int) -> int:
    """Raise the soft limit of open files as far as `connections_max` needs, and return the connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections_max + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections_max if soft == resource.RLIM_INFINITY else max(1, min(connections_max, soft - _RESERVED_FILES))


def _to_address_key(address: str) -> str:
    """Return an IPv4 address itself, and the /64 network of an IPv6 address: one host can use all of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address


def _build_response(status_line: str) -> bytes:
    return f"HTTP/1.1 {status_line}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()


_RESPONSES = {
    **dict.fromkeys(ConnectionEnd, _build_response("503 Service Unavailable\r\nRetry-After: 1")),
    ConnectionEnd.HEADER_TIMEOUT: _build_response("408 Request Timeout"),
    ConnectionEnd.IDLE_TIMEOUT: _build_response("408 Request Timeout"),
    ConnectionEnd.HEADER_SIZE: _build_response("431 Request Header Fields Too Large"),
}
