"""Client methods for the models that pools serve, and their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ebbtide.client.methods import RequestMethod
from ebbtide.client.requests import Request, if_match_headers

if TYPE_CHECKING:
    from ebbtide.client.views import PoolDemandView, PoolServingView, PoolView


class ServingMethods:
    @RequestMethod
    def report_requests(
        self, pool: str, requests: Sequence[Mapping[str, Any]], *, at_s: float | None = None
    ) -> Request[PoolDemandView]:
        """Report the requests for each model that the pool serves, as `{"model": ..., "rate": ...}`.

        Optional fields of a request are `lengths` and `burstiness`. `at_s` is in seconds since 1970, UTC; None means
        now.
        """
        report = {"requests": list(requests)} if at_s is None else {"requests": list(requests), "at": at_s}
        return Request("POST", f"{_pool_path(pool)}/demand", json=report)

    @RequestMethod
    def served_models(self, pool: str) -> Request[PoolServingView]:
        """Return the documents of the models that the pool serves."""
        return Request("GET", f"{_pool_path(pool)}/serving")

    @RequestMethod
    def set_served_models(
        self, pool: str, models: Sequence[Mapping[str, Any]], *, if_match: str = ""
    ) -> Request[PoolView]:
        """Replace the models that the pool serves."""
        document = {"serving": list(models)}
        return Request("PUT", f"{_pool_path(pool)}/serving", json=document, headers=if_match_headers(if_match))


def _pool_path(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"
