"""Client methods for pools, nodes, demand, queues, loans and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from ebbtide.client.connection import ClientMethods, if_match_headers

if TYPE_CHECKING:
    from api.loans import LoanView, SwitchesView
    from api.overview import OverviewView, WaitingView
    from api.pools import DemandHistoryView, NodeView, PoolDemandView, PoolForecastView, PoolView
    from api.queues import QueueView
    from api.usage import UsageReportView


class FleetMethods(ClientMethods):
    def overview(self, *, generation: int | None = None) -> OverviewView:
        """Return a summary of the whole fleet.

        With the `generation` of an earlier response, `nodes` holds only changed nodes.
        """
        query = {} if generation is None else {"generation": str(generation)}
        return self._connection.request("GET", "/v1/overview", query=query)

    def waiting(self, *, limit: int = 10) -> WaitingView:
        """Return the `limit` longest-pending jobs, each with its reason, and the number of jobs per reason."""
        return self._connection.request("GET", "/v1/waiting", query={"limit": str(limit)})

    def pools(self) -> list[PoolView]:
        return list(self._connection.list_items("/v1/pools", query={}))

    def pool(self, name: str) -> PoolView:
        return self._connection.request("GET", _pool_path(name))

    def create_pool(self, document: Mapping[str, Any]) -> PoolView:
        return self._connection.request("POST", "/v1/pools", json=document)

    def delete_pool(self, name: str, *, if_match: str = "") -> PoolView:
        return self._connection.request("DELETE", _pool_path(name), headers=if_match_headers(if_match))

    def nodes(self, *, pool: str = "") -> list[NodeView]:
        return list(self._connection.list_items("/v1/nodes", query={"pool": pool}))

    def node(self, name: str) -> NodeView:
        return self._connection.request("GET", _node_path(name))

    def add_node(self, document: Mapping[str, Any]) -> NodeView:
        return self._connection.request("POST", "/v1/nodes", json=document)

    def delete_node(self, name: str, *, if_match: str = "") -> NodeView:
        return self._connection.request("DELETE", _node_path(name), headers=if_match_headers(if_match))

    def cordon(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.request("POST", f"{_node_path(node)}:cordon", headers=if_match_headers(if_match))

    def drain(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.request("POST", f"{_node_path(node)}:drain", headers=if_match_headers(if_match))

    def uncordon(self, node: str, *, if_match: str = "") -> NodeView:
        return self._connection.request("POST", f"{_node_path(node)}:uncordon", headers=if_match_headers(if_match))

    def demand(self, pool: str) -> DemandHistoryView:
        """Return the pool's latest demand and its recorded readings."""
        return self._connection.request("GET", f"{_pool_path(pool)}/demand")

    def report_demand(self, pool: str, *, gpus: float, at_s: float | None = None) -> PoolDemandView:
        """Report how many GPUs the pool's inference needs from `at_s` on (seconds since 1970, UTC; None means now)."""
        report = {"gpus": gpus} if at_s is None else {"gpus": gpus, "at": at_s}
        return self._connection.request("POST", f"{_pool_path(pool)}/demand", json=report)

    def forecast(self, pool: str) -> PoolForecastView:
        return self._connection.request("GET", f"{_pool_path(pool)}/forecast")


def _pool_path(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"


def _node_path(name: str) -> str:
    return f"/v1/nodes/{quote(name, safe='')}"


class QueueMethods(ClientMethods):
    def queues(self) -> list[QueueView]:
        """Return declared queues and queues that live jobs name, with their usage."""
        return list(self._connection.list_items("/v1/queues", query={}))

    def queue(self, name: str) -> QueueView:
        return self._connection.request("GET", _queue_path(name))

    def create_queue(self, document: Mapping[str, Any]) -> QueueView:
        return self._connection.request("POST", "/v1/queues", json=document)

    def change_queue(self, name: str, change: Mapping[str, Any], *, if_match: str = "") -> QueueView:
        """Change some quota fields (`scheduler.domain.job_queue.QUOTA_FIELDS`) and keep the others."""
        return self._connection.request("PATCH", _queue_path(name), json=change, headers=if_match_headers(if_match))

    def delete_queue(self, name: str, *, if_match: str = "") -> QueueView:
        return self._connection.request("DELETE", _queue_path(name), headers=if_match_headers(if_match))


def _queue_path(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


class LendingMethods(ClientMethods):
    def loans(self, *, state: str = "") -> list[LoanView]:
        return list(self._connection.list_items("/v1/loans", query={"state": state}))

    def pause_lending(self) -> SwitchesView:
        return self._connection.request("POST", "/v1/lending:pause")

    def resume_lending(self) -> SwitchesView:
        return self._connection.request("POST", "/v1/lending:resume")

    def recall_all(self) -> SwitchesView:
        return self._connection.request("POST", "/v1/lending:recall-all")


class UsageMethods(ClientMethods):
    def usage(self, *, since: str = "", until: str = "", by: Sequence[str] = ("queue",)) -> UsageReportView:
        """Return GPU-seconds, grouped by any of day, hour, queue, owner and gpu.

        `since` and `until` are seconds since 1970 or ISO dates and times. The default is the last 30 days.
        """
        query = {"from": since, "to": until, "by": ",".join(by)}
        query = {name: value for name, value in query.items() if value}
        return cast("UsageReportView", self._connection.request("GET", "/v1/usage", query=query))
