"""Requests to the routes that only the service of the demo has."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, cast

import httpx

from cli.exit_codes import CommandError

if TYPE_CHECKING:
    from api.demo import DemoView

_TIMEOUT_S = 30.0


class DemoRoutes:
    """A connection to the demo's service at `url`.

    Its methods raise CommandError if the service is no demo, refuses the token or does not respond.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connection = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)

    def __enter__(self) -> DemoRoutes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def get_day(self) -> DemoView:
        return self._request("GET", "/v1/demo")

    def begin_day(self, *, started_at_s: float, day_s: float) -> DemoView:
        return self._request("PUT", "/v1/demo", {"started_at_s": started_at_s, "day_s": day_s})

    def surge(self) -> DemoView:
        """Raise the demand of all inference pools."""
        return self._request("POST", "/v1/demo/surge")

    def _request(self, method: str, path: str, document: dict[str, float] | None = None) -> DemoView:
        try:
            reply = self._connection.request(method, path, json=document)
        except httpx.TransportError as error:
            raise CommandError(f"no demo responds at {self._url} ({error}). Start one with `ebbtide demo`.") from error
        if reply.status_code == httpx.codes.NOT_FOUND:
            raise CommandError(f"the service at {self._url} is not a demo. Start one with `ebbtide demo`.")
        if reply.is_error:
            raise CommandError(f"{self._url}: {reply.json().get('detail') or f'status {reply.status_code}'}.")
        return cast("DemoView", reply.json())
