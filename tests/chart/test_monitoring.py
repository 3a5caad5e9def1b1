"""Alerts and dashboards of the chart: they name metrics that there are, and each alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from tests.chart import dashboards, manifests
from tests.chart.helm import CHART

RULES = CHART / "rules.yaml"
GUIDE = Path(__file__).parents[2] / "deploy" / "README.md"
PROVOKED = Path(__file__).parent / "alerts.yaml"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
promtool = shutil.which("promtool")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    for file in dashboards.FOLDER.glob("*.json"):
        panels = json.loads(file.read_text(encoding="utf-8"))["panels"]
        yield from (target["expr"] for panel in panels for target in panel["targets"])


def test_only_metrics_that_there_are_are_named() -> None:
    gauges = FleetGauges(Snapshot(), has_leader=True, inbox_size=0)
    families = [*REGISTRY.collect(), *gauges.collect()]
    known = {f"{family.name}{suffix}" for family in families for suffix in SUFFIXES[family.type]}
    named = {name for text in expressions() for name in re.findall(r"\bebbtide_\w+", text)}
    assert named
    assert named - known == set()


def test_the_dashboards_are_what_their_program_writes() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in dashboards.FOLDER.iterdir()}
    assert written == dict(dashboards.rendered()), "write them with `python -m tests.chart.dashboards`"


def test_the_chart_hands_rules_and_dashboards_on_as_they_are() -> None:
    made = {(each["kind"], each["metadata"]["name"]): each for each in manifests.read("everything")}
    assert made["PrometheusRule", "ebbtide"]["spec"]["groups"][0]["rules"] == alerts()
    assert made["ConfigMap", "ebbtide-dashboards"]["data"] == dict(dashboards.rendered())


def test_the_guide_says_what_to_do_about_each_alert() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if f"`{rule['alert']}`" not in guide] == []
    lines = [rule["annotations"]["runbook"] for rule in alerts()]
    assert lines == [f"deploy/README.md, what to do when, {rule['alert']}" for rule in alerts()]


def test_each_alert_is_provoked_and_spared() -> None:
    fires: defaultdict[str, set[bool]] = defaultdict(set)
    for play in yaml.safe_load(PROVOKED.read_text(encoding="utf-8"))["tests"]:
        for look in play["alert_rule_test"]:
            fires[look["alertname"]].add(bool(look["exp_alerts"]))
    assert dict(fires) == {rule["alert"]: {True, False} for rule in alerts()}


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_alerts_fire_when_they_should_and_not_before() -> None:
    assert promtool is not None
    told = subprocess.run([promtool, "test", "rules", str(PROVOKED)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
