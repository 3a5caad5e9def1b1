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
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.metrics_core import Metric

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from tests.chart import manifests
from tests.chart.helm import CHART
from tools.grafana_boards import render
from tools.grafana_boards.boards import BOARDS
from tools.grafana_boards.panels import INSTALLATION, select
from tools.reference_pages import count_panels

RULES = CHART / "rules.yaml"
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "runbook.md"
ALERT_CASES = tuple(Path(__file__).parent / f"{name}.yaml" for name in ("alerts", "forecast_alerts", "slos"))
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
promtool = shutil.which("promtool")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def rule_expressions() -> Iterator[str]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    yield from (rule["expr"] for group in groups for rule in group["rules"])


def board_expressions() -> Iterator[str]:
    """Yield the queries of panels and annotations as they are in the files."""
    for file in render.FOLDER.glob("*.json"):
        board = json.loads(file.read_text(encoding="utf-8"))
        yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
        yield from (annotation["expr"] for annotation in board["annotations"]["list"])


def expressions() -> Iterator[str]:
    yield from rule_expressions()
    yield from board_expressions()


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
    written = {file.name: file.read_text(encoding="utf-8") for file in render.FOLDER.iterdir()}
    assert written == dict(render.render_dashboards()), "regenerate with `python -m tools.grafana_boards`"


def test_dashboards_load_through_the_types_of_grafana() -> None:
    """The SDK reads each file into its models and writes the same JSON again, so no field is unknown to Grafana."""
    for file in render.FOLDER.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        loaded = Dashboard.from_json(json.loads(text))
        assert JSONEncoder(sort_keys=True, indent=2).encode(loaded) + "\n" == text


def test_chart_contains_rules_and_dashboards_with_its_own_addresses_and_objective() -> None:
    created = {(each["kind"], each["metadata"]["name"]): each for each in manifests.read("everything")}
    console, default = "https://ebbtide.example.com", "http://localhost:8787"
    rules = RULES.read_text(encoding="utf-8").replace(default, console).replace('le="3600.0"', 'le="1800.0"')
    assert created["PrometheusRule", "ebbtide"]["spec"] == yaml.safe_load(rules)
    boards = {name: text.replace(default, console) for name, text in render.render_dashboards()}
    assert created["ConfigMap", "ebbtide-dashboards"]["data"] == boards


def test_every_panel_is_described_and_selects_one_installation() -> None:
    for board in BOARDS:
        assert len({panel.title for panel in board.panels}) == len(board.panels), board.name
        for panel in board.panels:
            assert panel.about, panel.title
            for query in panel.queries.values():
                names = re.findall(r"\bebbtide[_:][\w:]+|\bALERTS\b", query)
                assert select(query).count(f"{{{INSTALLATION}") == len(names), query


def test_every_rule_keeps_installations_apart() -> None:
    """Each aggregation keeps the labels of the installation, and no selector stands outside of one."""
    for text in rule_expressions():
        aggregations = re.findall(r"\b(?:sum|max|min)\b(?! by \(cluster, namespace\b)", text)
        assert aggregations == [], text
        for clause in re.findall(r"\b(?:on|ignoring) \(([^)]*)\)", text):
            assert clause == "slo" or clause.startswith("cluster, namespace, "), text


def test_every_exporter_labels_its_metrics_with_the_cluster() -> None:
    created = manifests.read("everything")
    settings = manifests.named(created, "ConfigMap", "ebbtide")["data"]
    operator = manifests.named(created, "Deployment", "ebbtide-operator")["spec"]["template"]["spec"]
    (exporter,) = [each for each in operator["containers"] if each["name"] == "metrics"]
    assert settings["EBBTIDE_CLUSTER"] == "east"
    assert exporter["env"] == [{"name": "EBBTIDE_CLUSTER", "value": "east"}]


def test_the_guide_counts_the_panels_of_every_board() -> None:
    assert count_panels() in (GUIDE.parent / "monitor.md").read_text(encoding="utf-8")


def test_runbook_documents_every_alert() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, anchor) == ("http://localhost:8787/docs/runbook", rule["alert"].lower())
        assert guide.count(f"\n### {rule['alert']}\n") == 1, anchor


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    fires: defaultdict[str, set[bool]] = defaultdict(set)
    for play in [play for file in ALERT_CASES for play in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]:
        for look in play["alert_rule_test"]:
            fires[look["alertname"]].add(bool(look["exp_alerts"]))
    assert dict(fires) == {rule["alert"]: {True, False} for rule in alerts()}


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_alerts_pass_promtool() -> None:
    assert promtool is not None
    result = subprocess.run(
        [promtool, "test", "rules", *map(str, ALERT_CASES)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
