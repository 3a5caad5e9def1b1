"""Formats of a scrape, its exemplars, and the label of the cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.exposition import WRITE_INTERVAL_S, Bucket, ExemplarStore, TracedValue, read_exemplars
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import FORECAST_COVERAGE, JCT, TICK_DURATION, render_metrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
TRACE, OTHER_TRACE = "ab" * 16, "cd" * 16
PROGRAM = f"""
from scheduler.telemetry.metrics import *
TICK_DURATION.observe(0.02, "decide", trace_id="{TRACE}", at_s=1000.0)
REQUEST_DURATION.observe(0.2, "GET", "/v1/jobs")
"""
promtool = shutil.which("promtool")


def parse_openmetrics(text: str) -> Iterator[Metric]:
    yield from parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # untyped in the library


def gauges() -> FleetGauges:
    return FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True)


def list_exemplars(families: Iterator[Metric], histogram: str) -> dict[str, str]:
    """Return the traces of a histogram by upper bound."""
    samples = [sample for family in families if family.name == histogram for sample in family.samples]
    return {
        sample.labels["le"]: sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar is not None
    }


def test_the_text_format_is_the_default_and_openmetrics_is_negotiated() -> None:
    text, openmetrics = render_metrics(gauges()), render_metrics(gauges(), accept=OPENMETRICS)
    assert text.content_type.startswith("text/plain; version=0.0.4")
    assert openmetrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_text(text.body.decode())}
    assert {family.name for family in parse_openmetrics(openmetrics.body.decode())} == names


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_every_sample_has_the_label_of_the_cluster_if_it_is_set(accept: str) -> None:
    parse = parse_openmetrics if accept else parse_text
    for cluster in ("", "east"):
        body = render_metrics(gauges(), accept=accept, cluster=cluster).body.decode()
        found = {sample.labels.get("cluster", "") for family in parse(body) for sample in family.samples}
        assert found == {cluster}


def test_a_bucket_names_the_last_trace_of_its_observations() -> None:
    JCT.observe(100.0, trace_id=TRACE, at_s=1000.0)
    JCT.observe(200.0, trace_id=OTHER_TRACE, at_s=1001.0)
    JCT.observe(299.0)
    JCT.observe(1e9, trace_id=TRACE, at_s=1002.0)
    body = render_metrics(accept=OPENMETRICS).body.decode()
    assert list_exemplars(parse_openmetrics(body), "ebbtide_jct_seconds") == {"300.0": OTHER_TRACE, "+Inf": TRACE}
    assert TRACE not in render_metrics().body.decode(), "the text format has no exemplars"


def test_a_scrape_has_the_exemplars_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], env=environment, check=True, timeout=60)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    body = render_metrics(accept=OPENMETRICS, cluster="east").body.decode()
    assert list_exemplars(parse_openmetrics(body), TICK_DURATION.name) == {"0.025": TRACE}


def test_exemplars_are_written_at_intervals_and_the_newest_is_read(tmp_path: Path) -> None:
    store = ExemplarStore(tmp_path)
    bucket = Bucket("seconds", (), 1.0)
    for at_s in (0.0, WRITE_INTERVAL_S / 2, WRITE_INTERVAL_S, 1.5 * WRITE_INTERVAL_S):
        store.record("seconds", (1.0,), {}, TracedValue(TRACE, 0.5, at_s))
    assert read_exemplars(tmp_path)[bucket].at_s == WRITE_INTERVAL_S
    assert store.snapshot()[bucket].at_s == 1.5 * WRITE_INTERVAL_S
    (tmp_path / "exemplars_0.json").write_text(f'[["seconds", [], 1.0, "{OTHER_TRACE}", 0.5, 99.0]]')
    assert read_exemplars(tmp_path)[bucket].trace_id == OTHER_TRACE


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
@pytest.mark.parametrize("cluster", ["", "east"])
def test_promtool_reports_the_label_quantile_of_one_gauge_and_nothing_else(cluster: str) -> None:
    """The label is recorded in tests/contract, so it stays."""
    FORECAST_COVERAGE.labels("forecast-of-a-test", "0.9").set(0.95)
    text = render_metrics(gauges(), cluster=cluster).body
    FORECAST_COVERAGE.remove("forecast-of-a-test", "0.9")
    done = subprocess.run([str(promtool), "check", "metrics"], input=text, capture_output=True, check=False)
    [complaint] = done.stderr.decode().splitlines()
    assert done.stdout == b""
    assert complaint.startswith("ebbtide_forecast_coverage_ratio ")
    assert complaint.endswith('should not have "quantile" label')
