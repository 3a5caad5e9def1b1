"""The Python client of the HTTP API. Methods return the JSON objects of the API as typed dictionaries."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from ebbtide.client.administration import AccountMethods, RecordMethods, TokenMethods, WebhookMethods
from ebbtide.client.archives import ArchiveMethods
from ebbtide.client.connection import (
    Connection,
    FieldError,
    JsonObject,
    ProblemError,
    RetryPolicy,
    UnreachableError,
    etag_of,
)
from ebbtide.client.fleet import FleetMethods, LendingMethods, QueueMethods, UsageMethods
from ebbtide.client.jobs import JobMethods, SimulationMethods, StreamMethods
from ebbtide.client.machines import MachineMethods
from ebbtide.client.queue_secrets import SecretMethods

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Client", "FieldError", "JsonObject", "ProblemError", "RetryPolicy", "UnreachableError", "etag_of"]


class Client(
    JobMethods,
    ArchiveMethods,
    StreamMethods,
    FleetMethods,
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
        super().__init__(
            Connection(url, token=token, timeout_s=timeout_s, retries=retries or RetryPolicy(), transport=transport)
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
            self._connection.request("GET", "/readyz")
        except (ProblemError, UnreachableError):
            return False
        return True
