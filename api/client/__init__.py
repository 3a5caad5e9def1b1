"""Client: the HTTP API of DESIGN section 7 as typed methods. Answers are plain JSON values."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from api.client.administration import RecordMethods, TokenMethods, WebhookMethods
from api.client.connection import (
    Connection,
    FieldError,
    JsonObject,
    ProblemError,
    RetryPolicy,
    UnreachableError,
    etag_of,
)
from api.client.fleet import FleetMethods, LendingMethods, QueueMethods, UsageMethods
from api.client.jobs import JobMethods, SimulationMethods, StreamMethods

__all__ = ["Client", "FieldError", "JsonObject", "ProblemError", "RetryPolicy", "UnreachableError", "etag_of"]


class Client(
    JobMethods,
    StreamMethods,
    FleetMethods,
    QueueMethods,
    UsageMethods,
    LendingMethods,
    RecordMethods,
    WebhookMethods,
    SimulationMethods,
    TokenMethods,
):
    """A connection to one service. Use it as a context manager, or call `close`.

    Every method raises:
        ProblemError: the service refused; `status`, `title` and `detail` say why.
        UnreachableError: no usable answer came.
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
        """`token`: an API token or a JWT; without one, the service has to ask nobody who asks.

        Raises:
            ValueError: the URL is not http or https, or the token is none that can be sent.
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
        """The service answers and a controller leads, so that what is asked for will be done."""
        try:
            self._connection.request("GET", "/readyz")
        except (ProblemError, UnreachableError):
            return False
        return True
