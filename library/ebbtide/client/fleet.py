"""Client methods for pools, nodes, demand, queues and usage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ebbtide.client.methods import ListMethod, RequestMethod
from ebbtide.client.requests import Pages, Request, if_match_headers

if TYPE_CHECKING:
    from ebbtide.client.views import (
        AlertRulesView,
        DemandHistoryView,
        NodeView,
        OverviewView,
        PoolDemandView,
        PoolExplanationView,
        PoolForecastView,
        PoolView,
        ProblemsView,
        QueueView,
        SavingsReportView,
        UsageReportView,
        WaitingView,
    )


class FleetMethods:
    @RequestMethod
    def overview(self, *, generation: int | None = None) -> Request[OverviewView]:
        """Return a summary of the whole fleet.

        With the `generation` of an earlier response, `nodes` holds only changed nodes.
        """
        query = {} if generation is None else {"generation": str(generation)}
        return Request("GET", "/v1/overview", query=query)

    @RequestMethod
    def waiting(self, *, limit: int = 10, reasons: Collection[str] = (), gpu: str = "") -> Request[WaitingView]:
        """Return the `limit` longest-pending jobs, each with its reason, and the number of all pending jobs per reason.

        `reasons`: only jobs that wait for one of these reason codes. `gpu`: only jobs that may run on this GPU model.
        """
        filters = {"reason": ",".join(reasons), "gpu": gpu}
        stated = {name: value for name, value in filters.items() if value}
        return Request("GET", "/v1/waiting", query={"limit": str(limit), **stated})

    @RequestMethod
    def problems(self, *, resolved_since_s: float | None = None) -> Request[ProblemsView]:
        """Return what is wrong now, the most severe first. A healthy fleet has no problems.

        `resolved_since_s`: also return the problems that ended since then, in seconds since 1970 (UTC).
        """
        query = {} if resolved_since_s is None else {"resolved_since_s": str(resolved_since_s)}
        return Request("GET", "/v1/problems", query=query)

    @RequestMethod
    def alert_rules(self) -> Request[AlertRulesView]:
        """Return the alert rules for Prometheus that come with the service."""
        return Request("GET", "/v1/alert-rules")

    @ListMethod
    def pools(self) -> Pages[PoolView]:
        return Pages("/v1/pools")

    @RequestMethod
    def pool(self, name: str) -> Request[PoolView]:
        return Request("GET", _pool_path(name))

    @RequestMethod
    def create_pool(self, document: Mapping[str, Any]) -> Request[PoolView]:
        return Request("POST", "/v1/pools", json=document)

    @RequestMethod
    def change_pool(self, name: str, change: Mapping[str, Any], *, if_match: str = "") -> Request[PoolView]:
        """Change some fields of the lending policy, as `{"lending": {...}}`, and keep the others."""
        return Request("PATCH", _pool_path(name), json=change, headers=if_match_headers(if_match))

    @RequestMethod
    def delete_pool(self, name: str, *, if_match: str = "") -> Request[PoolView]:
        return Request("DELETE", _pool_path(name), headers=if_match_headers(if_match))

    @ListMethod
    def nodes(self, *, pool: str = "") -> Pages[NodeView]:
        return Pages("/v1/nodes", query={"pool": pool})

    @RequestMethod
    def node(self, name: str) -> Request[NodeView]:
        return Request("GET", _node_path(name))

    @RequestMethod
    def add_node(self, document: Mapping[str, Any]) -> Request[NodeView]:
        return Request("POST", "/v1/nodes", json=document)

    @RequestMethod
    def delete_node(self, name: str, *, if_match: str = "") -> Request[NodeView]:
        return Request("DELETE", _node_path(name), headers=if_match_headers(if_match))

    @RequestMethod
    def change_node(
        self,
        node: str,
        *,
        lendable: bool | None = None,
        lendable_gpus: Sequence[int] | None = None,
        if_match: str = "",
    ) -> Request[NodeView]:
        """Set whether a node of an inference pool can be lent, and which GPUs a loan takes. None keeps either.

        Without `lendable_gpus`, a loan takes the whole node. A loan that no longer fits is recalled.
        """
        change: dict[str, Any] = {} if lendable is None else {"lendable": lendable}
        if lendable_gpus is not None:
            change["lendable_gpus"] = list(lendable_gpus)
        return Request("PATCH", _node_path(node), json=change, headers=if_match_headers(if_match))

    @RequestMethod
    def cordon(self, node: str, *, if_match: str = "") -> Request[NodeView]:
        return Request("POST", f"{_node_path(node)}:cordon", headers=if_match_headers(if_match))

    @RequestMethod
    def drain(self, node: str, *, if_match: str = "") -> Request[NodeView]:
        return Request("POST", f"{_node_path(node)}:drain", headers=if_match_headers(if_match))

    @RequestMethod
    def uncordon(self, node: str, *, if_match: str = "") -> Request[NodeView]:
        return Request("POST", f"{_node_path(node)}:uncordon", headers=if_match_headers(if_match))

    @RequestMethod
    def demand(self, pool: str) -> Request[DemandHistoryView]:
        """Return the pool's latest demand and its recorded readings."""
        return Request("GET", f"{_pool_path(pool)}/demand")

    @RequestMethod
    def report_demand(self, pool: str, *, gpus: float, at_s: float | None = None) -> Request[PoolDemandView]:
        """Report how many GPUs the pool's inference needs from `at_s` on (seconds since 1970, UTC; None means now)."""
        report = {"gpus": gpus} if at_s is None else {"gpus": gpus, "at": at_s}
        return Request("POST", f"{_pool_path(pool)}/demand", json=report)

    @RequestMethod
    def push_demand(self, pool: str, readings: Sequence[tuple[float, float]]) -> Request[PoolDemandView]:
        """Report readings of what the pool's inference needed: pairs of seconds since 1970 (UTC) and GPUs.

        The newest reading becomes the present demand if it is newer than the latest one. The others enter the history
        that forecasts learn from. One request takes up to 50,000 readings.
        """
        points = [{"at": at_s, "gpus": gpus} for at_s, gpus in readings]
        return Request("POST", f"{_pool_path(pool)}/demand", json={"readings": points})

    @RequestMethod
    def set_demand_source(self, pool: str, source: Mapping[str, Any], *, if_match: str = "") -> Request[PoolView]:
        """Let the service poll Prometheus for the demand of a pool."""
        return Request("PUT", f"{_pool_path(pool)}/demand-source", json=source, headers=if_match_headers(if_match))

    @RequestMethod
    def delete_demand_source(self, pool: str, *, if_match: str = "") -> Request[PoolView]:
        """Stop polling for the demand of a pool, so that only reports set it."""
        return Request("DELETE", f"{_pool_path(pool)}/demand-source", headers=if_match_headers(if_match))

    @RequestMethod
    def forecast(self, pool: str) -> Request[PoolForecastView]:
        return Request("GET", f"{_pool_path(pool)}/forecast")

    @RequestMethod
    def pool_explanation(self, pool: str) -> Request[PoolExplanationView]:
        """Return why the pool lends nothing, or nothing more, and what would change that."""
        return Request("GET", f"{_pool_path(pool)}/explanation")


def _pool_path(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"


def _node_path(name: str) -> str:
    return f"/v1/nodes/{quote(name, safe='')}"


class QueueMethods:
    @ListMethod
    def queues(self) -> Pages[QueueView]:
        """Return declared queues and queues that live jobs name, with their usage."""
        return Pages("/v1/queues")

    @RequestMethod
    def queue(self, name: str) -> Request[QueueView]:
        return Request("GET", _queue_path(name))

    @RequestMethod
    def create_queue(self, document: Mapping[str, Any]) -> Request[QueueView]:
        return Request("POST", "/v1/queues", json=document)

    @RequestMethod
    def change_queue(self, name: str, change: Mapping[str, Any], *, if_match: str = "") -> Request[QueueView]:
        """Change some quota fields (`scheduler.domain.job_queue.QUOTA_FIELDS`) and keep the others."""
        return Request("PATCH", _queue_path(name), json=change, headers=if_match_headers(if_match))

    @RequestMethod
    def delete_queue(self, name: str, *, if_match: str = "") -> Request[QueueView]:
        return Request("DELETE", _queue_path(name), headers=if_match_headers(if_match))


def _queue_path(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


class UsageMethods:
    @RequestMethod
    def usage(self, *, since: str = "", until: str = "", by: Sequence[str] = ("queue",)) -> Request[UsageReportView]:
        """Return GPU-seconds, grouped by any of day, hour, queue, owner, gpu and model.

        `since` and `until` are seconds since 1970 or ISO dates and times. The default is the last 30 days.
        """
        return Request("GET", "/v1/usage", query=_period_query(since, until, ",".join(by)))

    @RequestMethod
    def savings(self, *, since: str = "", until: str = "", by: str = "day") -> Request[SavingsReportView]:
        """Return GPU time lent, used, lost and idle while jobs waited, with amounts if the service has prices.

        `by` is day, queue, owner, gpu or model. Times are as in `usage`.
        """
        return Request("GET", "/v1/savings", query=_period_query(since, until, by))


def _period_query(since: str, until: str, by: str) -> dict[str, str]:
    return {name: value for name, value in (("from", since), ("to", until), ("by", by)) if value}
