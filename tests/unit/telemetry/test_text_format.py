"""What we write is what prometheus_client writes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from scheduler.telemetry.text_format import render


def strange() -> Collector:
    registry = CollectorRegistry()
    Counter("counted", 'A "text"\nof \\ two lines.', ["b", "a"], registry=registry).labels('x"\n\\', "ü").inc(1e9)
    Histogram("took_seconds", "Time.", ["of"], buckets=(0.1, 2.5), registry=registry).labels("").observe(0.3)
    Gauge("nothing", "Without a value.", registry=registry).set(float("nan"))
    Gauge("endless", "Without an end.", registry=registry).set(float("-inf"))
    return registry


def empty() -> Collector:
    class Empty(Collector):
        def collect(self) -> list[GaugeMetricFamily]:
            return [GaugeMetricFamily("none", "No sample.", labels=["a"])]

    return Empty()


@pytest.mark.parametrize(
    "collector", [REGISTRY, FleetGauges(Snapshot(), has_leader=True, inbox_size=3), strange(), empty()]
)
def test_it_is_byte_for_byte_what_the_library_writes(collector: Collector) -> None:
    registry = CollectorRegistry()
    registry.register(collector)
    assert render(registry) == generate_latest(registry)
