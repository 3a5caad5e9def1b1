"""README's table of metrics is true: every one of them, with the type and the labels that it has."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry import metrics
from scheduler.telemetry.fleet_gauges import FleetGauges

README = Path(__file__).resolve().parents[3] / "README.md"
_ROW = re.compile(r"\| ((?:`ebbtide_\w+` )+)\| (counter|gauge|histogram) \| (.*?) ?\| \S.* \|")


def declared() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of each metric."""
    counted = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]
    found = {
        f"{each._name}_total" if each._type == "counter" else each._name: (str(each._type), tuple(each._labelnames))
        for each in counted
    }
    assert len(found) == len(list(metrics.REGISTRY.collect()))
    for family in FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True).collect():
        assert isinstance(family, GaugeMetricFamily)
        found[family.name] = ("gauge", tuple(family._labelnames))
    return found


def test_every_metric_stands_in_it_once_with_its_type_and_its_labels() -> None:
    told: dict[str, tuple[str, tuple[str, ...]]] = {}
    for line in README.read_text(encoding="utf-8").splitlines():
        if row := _ROW.fullmatch(line):
            names, kind, labels = row.groups()
            for name in re.findall(r"`(\w+)`", names):
                assert name not in told, name
                told[name] = (kind, tuple(re.findall(r"`(\w+)`", labels)))
    assert told == declared()
