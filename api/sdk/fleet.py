"""Pools and nodes, and the demand of inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from api.sdk.calls import Calls, matching

if TYPE_CHECKING:
    from api.answers.fleet import DemandHistoryView, NodeView, PoolDemandView, PoolForecastView, PoolView
    from api.answers.overview import OverviewView, WaitingView


class FleetCalls(Calls):
    def overview(self, *, generation: int | None = None) -> OverviewView:
        """The whole fleet at a glance; with the `generation` of an earlier answer, of nodes only what has changed."""
        query = {} if generation is None else {"generation": str(generation)}
        return self._connection.object("GET", "/v1/overview", query=query)

    def waiting(self, *, limit: int = 10) -> WaitingView:
        """The `limit` jobs that have waited longest, each with the reason, and how many wait for which."""
        return self._connection.object("GET", "/v1/waiting", query={"limit": str(limit)})

    def pools(self) -> list[PoolView]:
        return list(self._connection.items("/v1/pools", query={}))

    def pool(self, name: str) -> PoolView:
        return self._connection.object("GET", _pool(name))

    def create_pool(self, document: Mapping[str, Any]) -> PoolView:
        return self._connection.object("POST", "/v1/pools", json=document)

    def delete_pool(self, name: str, *, if_match: str = "") -> PoolView:
        return self._connection.object("DELETE", _pool(name), headers=matching(if_match))

    def nodes(self, *, pool: str = "") -> list[NodeView]:
        return list(self._connection.items("/v1/nodes", query={"pool": pool}))

    def node(self, name: str) -> NodeView:
        return self._connection.object("GET", _node(name))

    def add_node(self, document: Mapping[str, Any]) -> NodeView:
        return self._connection.object("POST", "/v1/nodes", json=document)

    def delete_node(self, name: str, *, if_match: str = "") -> NodeView:
        return self._connection.object("DELETE", _node(name), headers=matching(if_match))

    def cordon(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.object("POST", f"{_node(node)}:cordon", headers=matching(if_match))

    def drain(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.object("POST", f"{_node(node)}:drain", headers=matching(if_match))

    def uncordon(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.object("POST", f"{_node(node)}:uncordon", headers=matching(if_match))

    def demand(self, pool: str) -> DemandHistoryView:
        """The pool's latest demand and the recorded readings."""
        return self._connection.object("GET", f"{_pool(pool)}/demand")

    def report_demand(self, pool: str, *, gpus: float, at_s: float | None = None) -> PoolDemandView:
        """Say how many GPUs the pool's inference needs from `at_s` on (seconds since 1970, UTC; None: from now on)."""
        report = {"gpus": gpus} if at_s is None else {"gpus": gpus, "at": at_s}
        return self._connection.object("POST", f"{_pool(pool)}/demand", json=report)

    def forecast(self, pool: str) -> PoolForecastView:
        return self._connection.object("GET", f"{_pool(pool)}/forecast")


def _pool(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"


def _node(name: str) -> str:
    return f"/v1/nodes/{quote(name, safe='')}"
