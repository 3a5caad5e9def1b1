"""Alerts and the dashboard of the chart: Prometheus can read them, and they name metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from tests.chart.helm import CHART

RULES = CHART / "rules.yaml"
GUIDE = Path(__file__).parents[2] / "deploy" / "README.md"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
promtool = shutil.which("promtool")


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    dashboard = json.loads((CHART / "dashboards" / "ebbtide.json").read_text(encoding="utf-8"))
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_only_metrics_that_there_are_are_named() -> None:
    gauges = FleetGauges(Snapshot(), has_leader=True, inbox_size=0)
    families = [*REGISTRY.collect(), *gauges.collect()]
    known = {f"{family.name}{suffix}" for family in families for suffix in SUFFIXES[family.type]}
    named = {name for text in expressions() for name in re.findall(r"\bebbtide_\w+", text)}
    assert named
    assert named - known == set()


def test_the_guide_says_what_to_do_about_each_alert() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        assert [rule["alert"] for rule in group["rules"] if f"`{rule['alert']}`" not in guide] == []


PROVOKED = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'ebbtide_recalls_late_total{{pod="a"}}', values: '0x10 1x30'}}
      - {{series: 'ebbtide_leader{{pod="a"}}', values: '1x40'}}
      - {{series: 'ebbtide_leader{{pod="b"}}', values: '1x20 0x20'}}
      - {{series: 'ebbtide_demand_age_seconds{{pool="chat"}}', values: '0+60x40'}}
    alert_rule_test:
      - {{eval_time: 12m, alertname: EbbtideRecallLate, exp_alerts: [{{exp_labels: {{severity: critical}}, exp_annotations: {{summary: A lent node was not home by its deadline.}}}}]}}
      - {{eval_time: 30m, alertname: EbbtideRecallLate, exp_alerts: []}}
      - {{eval_time: 30m, alertname: EbbtideLeaderMissing, exp_alerts: []}}
      - {{eval_time: 30m, alertname: EbbtideDemandStale, exp_alerts: []}}
    promql_expr_test:
      - {{expr: 'count(ALERTS{{alertname="EbbtideDemandStale", alertstate="firing"}})', eval_time: 38m, exp_samples: [{{value: 1}}]}}
  - interval: 1m
    input_series:
      - {{series: 'ebbtide_leader{{pod="a"}}', values: '1x5 0x5 _x10'}}
    promql_expr_test:
      - {{expr: 'count(ALERTS{{alertname="EbbtideLeaderMissing", alertstate="firing"}})', eval_time: 9m, exp_samples: [{{value: 1}}]}}
      - {{expr: 'count(ALERTS{{alertname="EbbtideLeaderMissing", alertstate="firing"}})', eval_time: 19m, exp_samples: [{{value: 1}}]}}
"""  # noqa: E501


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    assert promtool is not None
    script = tmp_path / "provoked.yaml"
    script.write_text(PROVOKED.format(rules=RULES), encoding="utf-8")
    told = subprocess.run([promtool, "test", "rules", str(script)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
