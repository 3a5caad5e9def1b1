"""Python clients of the HTTP API. Methods return the JSON objects of the API as typed dictionaries.

`Client` blocks, `AsyncClient` runs on an event loop. Both have the same methods. The types of the dictionaries are in
`ebbtide.client.views`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from ebbtide.client.administration import AccountMethods, RecordMethods, TokenMethods, WebhookMethods
from ebbtide.client.archives import ArchiveMethods
from ebbtide.client.async_connection import AsyncConnection
from ebbtide.client.connection import Connection, RetryPolicy, Server
from ebbtide.client.fleet import FleetMethods, QueueMethods, UsageMethods
from ebbtide.client.hardware import HardwareMethods
from ebbtide.client.jobs import JobMethods, StreamMethods
from ebbtide.client.lending import LendingMethods
from ebbtide.client.machines import MachineMethods
from ebbtide.client.methods import AsyncCaller, SyncCaller
from ebbtide.client.queue_secrets import SecretMethods
from ebbtide.client.requests import Request, discard
from ebbtide.client.responses import FieldError, JsonObject, ProblemError, UnreachableError, etag_of
from ebbtide.client.serving import ServingMethods
from ebbtide.client.simulations import SimulationMethods

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AsyncClient", "Client", "FieldError", "JsonObject", "ProblemError", "RetryPolicy", "UnreachableError", "etag_of",
]  # fmt: skip

_READINESS: Request[None] = Request("GET", "/readyz", read=discard)


class _ServiceMethods(
    JobMethods,
    ArchiveMethods,
    StreamMethods,
    FleetMethods,
    ServingMethods,
    HardwareMethods,
    MachineMethods,
    QueueMethods,
    SecretMethods,
    UsageMethods,
    LendingMethods,
    RecordMethods,
    WebhookMethods,
    SimulationMethods,
    TokenMethods,
    AccountMethods,
):
    """All methods of both clients."""


class Client(_ServiceMethods, SyncCaller):
    """A client of one service. Use it as a context manager, or call `close`.

    Every method raises:
        ProblemError: the service rejected the request. See `status`, `title` and `detail`.
        UnreachableError: no usable response came.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`token`: an API token or a JWT. It may be empty if the service runs without authentication.

        Raises:
            ValueError: the URL is not http or https, or the token cannot be sent in a header.
        """
        self._connection = Connection(
            Server(url, token), timeout_s=timeout_s, retries=retries or RetryPolicy(), transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def is_ready(self) -> bool:
        """Return whether the service answers and a controller leads, so that commands take effect."""
        try:
            self._connection.send(_READINESS)
        except (ProblemError, UnreachableError):
            return False
        return True


class AsyncClient(_ServiceMethods, AsyncCaller):
    """A client of one service for asyncio and trio. Use it as an asynchronous context manager, or call `close`.

    It has the methods of `Client`. They return awaitables; those that return iterators return asynchronous ones:

        async with AsyncClient("https://ebbtide.example", token=token) as client:
            job = await client.submit(document)
            async for line in client.follow_logs(job["id"]):
                print(line["text"])
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Takes the arguments of `Client` and raises the same errors."""
        self._connection = AsyncConnection(
            Server(url, token), timeout_s=timeout_s, retries=retries or RetryPolicy(), transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    async def is_ready(self) -> bool:
        """Return whether the service answers and a controller leads, so that commands take effect."""
        try:
            await self._connection.send(_READINESS)
        except (ProblemError, UnreachableError):
            return False
        return True
