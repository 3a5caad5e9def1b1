"""Queries of dashboards and alerts on a real Prometheus, with the samples of a simulated day and of a real service."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chart.test_monitoring import RULES, alerts
from tests.contract.prometheus_site import PROGRAM, Prometheus
from tests.kubernetes.waiting import eventually
from tests.loopback import find_free_port
from tests.monitoring.dashboard_queries import interpolate
from tests.monitoring.simulated_day import CLUSTER, END_S, SCRAPE_S, START_S
from tools.grafana_boards.boards import BOARDS
from tools.grafana_boards.panels import Panel, select
from tools.grafana_boards.render import FOLDER

promtool = shutil.which("promtool")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None or promtool is None, reason="no Prometheus: Debian's package prometheus has it"),
]
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the samples of the day."""
    folder = tmp_path_factory.mktemp("day")
    samples, data = folder / "samples.txt", folder / "data"
    subprocess.run([sys.executable, "-W", "error", "-m", "tests.monitoring.simulated_day", samples], check=True)
    command = [str(promtool), "tsdb", "create-blocks-from", "openmetrics", str(samples), str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made = Prometheus(folder, NOWHERE, every="1m", data=data)
    made.start()
    _record_rules(made, data)
    yield made
    made.kill()


def _record_rules(prometheus: Prometheus, data: Path) -> None:
    """Evaluate the recording rules over the day, and load the results."""
    span = ("--start", f"{START_S:.0f}", "--end", f"{END_S:.0f}", "--eval-interval", "10m")
    command = [str(promtool), "tsdb", "create-blocks-from", "rules", *span, "--output-dir", str(data)]
    subprocess.run([*command, "--url", prometheus.url, str(RULES)], check=True, capture_output=True)
    prometheus.kill()
    prometheus.start()


def values(day: Prometheus, query: str) -> list[float]:
    """Return all values of a query over the day, except for its first minutes, when nothing has increased."""
    answer = day.ask("query_range", query=query, start=START_S + 600.0, end=END_S, step=SCRAPE_S)
    return [float(value) for series in answer["result"] for _, value in series["values"]]


PANELS = [pytest.param(panel, id=f"{board.name}: {panel.title}") for board in BOARDS for panel in board.panels]


@pytest.mark.full
@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_query_has_values(day: Prometheus, panel: Panel) -> None:
    """Every query is evaluated. One must have values that are not 0, unless the panel says why it is empty this day."""
    found = [values(day, interpolate(select(query), cluster=CLUSTER)) for query in panel.queries.values()]
    shown = [value for each in found for value in each if math.isfinite(value)]
    assert any(shown) != bool(panel.empty) or panel.title in ALL_ZERO, panel.queries


ALL_ZERO = {"Clock ahead", "Demand", "Demand readings", "Mean optimality gap"}
"""Panels whose values are all 0 this day: no clock is wrong, demand is always known, and all plans are optimal."""


@pytest.mark.full
def test_annotations_mark_recalls_and_deploys(day: Prometheus) -> None:
    for file in FOLDER.glob("*.json"):
        for annotation in json.loads(file.read_text(encoding="utf-8"))["annotations"]["list"]:
            query = interpolate(annotation["expr"], cluster=CLUSTER)
            answer = day.ask("query_range", query=query, start=START_S, end=END_S, step=300.0)["result"]
            assert answer != [], annotation["name"]


EXPECTED = {
    "EbbtideCapacityDown",
    "EbbtideDecisionsDropped",
    "EbbtideInferenceShort",
    "EbbtideJobRestarting",
    "EbbtideNodeDown",
    "EbbtideRecallLate",
    "EbbtideThrashing",
    *(f"EbbtideInferenceBudgetBurn {window}" for window in ("1h", "6h", "3d")),
    *("EbbtideRecallBudgetBurn 6h", "EbbtideRecallBudgetBurn 3d"),
    *("EbbtideGoodputBudgetBurn 3d", "EbbtideQueueWaitBudgetBurn 6h", "EbbtideQueueWaitBudgetBurn 3d"),
}
"""Alerts expected on this day: a job that keeps crashing, lost nodes, an unforeseen surge of demand, saves that exceed
their deadlines, a policy that selects unknown GPUs, and jobs that wait for GPUs."""


def name_alert(alert: dict[str, Any]) -> str:
    return " ".join(filter(None, (alert["alert"], alert["labels"].get("window", ""))))


@pytest.mark.full
@pytest.mark.parametrize("alert", alerts(), ids=name_alert)
def test_alert_is_evaluated_and_fires_if_expected(day: Prometheus, alert: dict[str, Any]) -> None:
    assert bool(values(day, alert["expr"])) == (name_alert(alert) in EXPECTED)


COUNTED = {
    "EbbtideDecisionsDropped": "ebbtide_violations_total",
    "EbbtideNodeDown": 'ebbtide_breaches_total{kind="node-down"}',
    "EbbtideRecallLate": "ebbtide_recalls_late_total",
}
"""Alerts on counters, and the events that they count on this day."""


@pytest.mark.full
@pytest.mark.parametrize("alert", COUNTED)
def test_counter_alert_fires_on_the_first_event(day: Prometheus, alert: str) -> None:
    (rule,) = [rule for rule in alerts() if rule["alert"] == alert]
    query = f"{COUNTED[alert]} > 0"
    counted = day.ask("query_range", query=query, start=START_S, end=END_S, step=SCRAPE_S)["result"]
    first_s = min(float(series["values"][0][0]) for series in counted)
    assert day.ask("query", query=rule["expr"], time=first_s)["result"] != []
    assert day.ask("query", query=rule["expr"], time=first_s - SCRAPE_S)["result"] == []


@pytest.mark.full
def test_real_service_is_scraped_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    address = f"127.0.0.1:{find_free_port()}"
    environment = {
        **os.environ,
        "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/ebbtide.sqlite",
        "EBBTIDE_RUN_DIR": f"{tmp_path}/run",
        "EBBTIDE_PORT": address.partition(":")[2],
        "EBBTIDE_METRICS_OPEN": "true",
        "XDG_STATE_HOME": f"{tmp_path}/state",
    }
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    prometheus = Prometheus(tmp_path, address, every="1s", rules=RULES)
    with (tmp_path / "service.log").open("wb") as log:
        service = subprocess.Popen([sys.executable, "-m", "cli", "serve"], env=environment, stdout=log, stderr=log)
    try:
        prometheus.start()

        def has(query: str) -> bool:
            return bool(prometheus.ask("query", query=query)["result"])

        ticks = 'increase(ebbtide_tick_duration_seconds_count{stage="decide"}[10s]) > 0'
        for query in ("ebbtide_leader == 1", ticks, 'ebbtide_api_request_duration_seconds_count{route="/metrics"} > 0'):
            eventually(partial(has, query), what=query)
        eventually(lambda: all(rule["health"] == "ok" for rule in _rules(prometheus)), what="all rules are judged")
        judged = {rule["name"] for rule in _rules(prometheus) if rule["type"] == "alerting"}
        assert judged == {alert["alert"] for alert in alerts()}
    finally:
        prometheus.kill()
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0


def _rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
