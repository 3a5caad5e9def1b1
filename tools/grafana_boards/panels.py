"""Panels as data, and the PromQL that several boards share.

A query names its installation by a placeholder: `{@}` selects the one of the variables `cluster` and `namespace`, and
`{@pool}` and `{@queue}` the chosen pools or queues of it. So no panel adds up two installations.

Only the leader increments counters: aggregate them with sum. Every API replica exports the same gauges: aggregate them
with max.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

INSTALLATION = 'cluster="$cluster", namespace="$namespace"'
_SELECTORS = {
    "@pool": f'{INSTALLATION}, pool=~"$pool"',
    "@queue": f'{INSTALLATION}, queue=~"$queue"',
    "@": INSTALLATION,
}

Thresholds = tuple[tuple[float, str], ...]
"""Colours from a value on. The first holds from the lowest value."""
NO_THRESHOLDS: Thresholds = ()
LOWEST = float("-inf")
GOOD, FAIR, BAD, NEUTRAL = "green", "orange", "red", "blue"


class Kind(StrEnum):
    """Types of panels. The value is Grafana's name."""

    STAT = "stat"
    GRAPH = "timeseries"
    HEATMAP = "heatmap"
    STATES = "state-timeline"
    BARS = "bargauge"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Args:
        queries: PromQL by legend.
        thresholds: colours of a stat or a bar, or lines of a graph.
        states: text and colour by value, for state timelines and stats.
        page: page of the console that a click on a value opens.
        empty: why the panel has no data on the day that the tests simulate; empty: it must have data.
    """

    kind: Kind
    title: str
    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    width: int = 12
    stacked: bool = False
    thresholds: Thresholds = NO_THRESHOLDS
    states: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    page: str = ""
    maximum: float | None = None
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    name: str
    title: str
    about: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def select(query: str) -> str:
    """Return the query with the matchers of the installation in place of the placeholders."""
    for placeholder, matchers in _SELECTORS.items():
        query = query.replace(f"{{{placeholder}}}", f"{{{matchers}}}").replace(f"{{{placeholder}, ", f"{{{matchers}, ")
    return query


def stat(
    title: str, query: str, unit: str = "short", *, about: str, thresholds: Thresholds, width: int = 4, **more: Any
) -> Panel:
    return Panel(Kind.STAT, title, about, {title: query}, unit, width, thresholds=thresholds, **more)


def at_least(good: float, fair: float) -> Thresholds:
    """Return thresholds of a value that should be high."""
    return ((LOWEST, BAD), (fair, FAIR), (good, GOOD))


def at_most(good: float, fair: float) -> Thresholds:
    """Return thresholds of a value that should be low: green up to `good`, orange up to `fair`."""
    return ((LOWEST, GOOD), (good, FAIR), (fair, BAD))


UNJUDGED: Thresholds = ((LOWEST, NEUTRAL),)


def latest(gauge: str, by: str = "", legend: str = "") -> dict[str, str]:
    """Return the query of a gauge by label."""
    return {legend or label(by): f"max by ({by}) ({gauge})" if by else f"max({gauge})"}


def hourly(counter: str, by: str = "", legend: str = "") -> dict[str, str]:
    """Return the query of the increase of a counter per hour, without series that did not increase."""
    grouped = f"sum by ({by})" if by else "sum"
    return {legend or label(by): f"{grouped} (increase({counter}[1h])) > 0"}


def quantiles(metric: str, selector: str = "@", by: str = "", *, window: str = "1h") -> dict[str, str]:
    """Return queries for the median and the 95th percentile of a histogram; with `by`, the latter per label."""
    rate = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{{{selector}}}[{window}]))"
    if by:
        return {label(by): f"histogram_quantile(0.95, {rate})"}
    return {"median": f"histogram_quantile(0.5, {rate})", "95th percentile": f"histogram_quantile(0.95, {rate})"}


def buckets(metric: str) -> dict[str, str]:
    """Return the query of a heatmap of a histogram."""
    return {"{{le}}": f"sum by (le) (increase({metric}_bucket{{@}}[$__rate_interval]))"}


def label(by: str) -> str:
    """Return a legend that shows the values of the labels."""
    return " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(",") if each.strip())
