"""The reference page of metrics lists every metric with its type and labels."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry import metrics
from scheduler.telemetry.fleet_gauges import FleetGauges

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/metrics.md"
_ROW = re.compile(r"\| `(ebbtide_\w+)` \| (counter|gauge|histogram) \| (.*?) ?\| \S.* \|")


def declared_metrics() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return type and labels of each metric."""
    recorded = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]
    found = {
        f"{each._name}_total" if each._type == "counter" else each._name: (str(each._type), tuple(each._labelnames))
        for each in recorded
    }
    assert len(found) == len(list(metrics.REGISTRY.collect()))
    for family in FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True).collect():
        assert isinstance(family, GaugeMetricFamily)
        found[family.name] = ("gauge", tuple(family._labelnames))
    return found


def test_page_lists_every_metric_with_type_and_labels() -> None:
    listed: dict[str, tuple[str, tuple[str, ...]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := _ROW.fullmatch(line):
            name, metric_type, labels = row.groups()
            assert name not in listed, name
            listed[name] = (metric_type, tuple(re.findall(r"`(\w+)`", labels)))
    assert listed == declared_metrics()
