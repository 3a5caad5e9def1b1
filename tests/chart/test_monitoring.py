"""Alerts and dashboards of the chart use existing metrics, and each alert fires on its condition."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from tests.chart import dashboards, manifests
from tests.chart.helm import CHART

RULES = CHART / "rules.yaml"
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "runbook.md"
ALERT_CASES = Path(__file__).parent / "alerts.yaml"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
promtool = shutil.which("promtool")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    for file in dashboards.FOLDER.glob("*.json"):
        panels = json.loads(file.read_text(encoding="utf-8"))["panels"]
        yield from (target["expr"] for panel in panels for target in panel.get("targets", ()))


def families() -> list[Metric]:
    gauges = FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True)
    return [*REGISTRY.collect(), *gauges.collect()]


def find_metric_names(texts: Iterable[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"\bebbtide_\w+", text)}


def test_alerts_and_dashboards_use_existing_metrics() -> None:
    known = {f"{family.name}{suffix}" for family in families() for suffix in SUFFIXES[family.type]}
    assert find_metric_names(expressions()) - known == set()


def test_every_metric_is_used() -> None:
    shown = find_metric_names(expressions())
    known = {family.name: {f"{family.name}{suffix}" for suffix in SUFFIXES[family.type]} for family in families()}
    assert [name for name, series in known.items() if not series & shown] == []


def test_committed_dashboards_match_the_generator() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in dashboards.FOLDER.iterdir()}
    assert written == dict(dashboards.render_dashboards()), "regenerate with `python -m tests.chart.dashboards`"


def test_chart_contains_rules_and_dashboards_unchanged() -> None:
    created = {(each["kind"], each["metadata"]["name"]): each for each in manifests.read("everything")}
    assert created["PrometheusRule", "ebbtide"]["spec"]["groups"][0]["rules"] == alerts()
    assert created["ConfigMap", "ebbtide-dashboards"]["data"] == dict(dashboards.render_dashboards())


def test_runbook_documents_every_alert() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for rule in alerts():
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (path, anchor) == ("docs/how-to/runbook.md", rule["alert"].lower())
        assert guide.count(f"\n### {rule['alert']}\n") == 1, anchor


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    fires: defaultdict[str, set[bool]] = defaultdict(set)
    for play in yaml.safe_load(ALERT_CASES.read_text(encoding="utf-8"))["tests"]:
        for look in play["alert_rule_test"]:
            fires[look["alertname"]].add(bool(look["exp_alerts"]))
    assert dict(fires) == {rule["alert"]: {True, False} for rule in alerts()}


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_alerts_pass_promtool() -> None:
    assert promtool is not None
    result = subprocess.run([promtool, "test", "rules", str(ALERT_CASES)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
