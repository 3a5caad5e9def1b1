"""Queries of dashboards as Grafana sends them, with values in place of the variables."""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLES = {
    "$namespace": "",
    "$pool": ".*",
    "$queue": ".*",
    "$__rate_interval": "10m",
    "$__interval": "5m",
    "$__range": "1d",
}


def interpolate(query: str, *, cluster: str = "") -> str:
    """Return the query for one installation. All pools and queues are chosen, and the range is a day."""
    values: Mapping[str, str] = {"$cluster": cluster, **_VARIABLES}
    for name, value in values.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
