"""Duration of a scrape of /metrics and its number of series, with the processes of `tests.benchmarks.metrics_site`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

from tests.benchmarks.metrics_site import NODES, PENDING, POOLS, QUEUES, RUNNING

_SITE = (sys.executable, "-m", "tests.benchmarks.metrics_site")
FLEET = f"{POOLS} pools, {QUEUES} queues, {NODES:,} nodes, {RUNNING + PENDING:,} jobs"


def rows() -> Iterator[tuple[str, str, str]]:
    """Measure one process, and an API that exports the metrics of a controller too, through files (`ebbtide serve`)."""
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    yield from _rows("one process", _run("both", environment))
    with TemporaryDirectory() as folder:
        environment["PROMETHEUS_MULTIPROC_DIR"] = folder
        command = [*_SITE, "record"]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
            assert controller.stdout is not None
            assert controller.stdout.readline() == b"recorded\n"
            yield from _rows("API and controller", _run("scrape", environment))
            controller.communicate()


def _rows(processes: str, output: str) -> Iterator[tuple[str, str, str]]:
    p50_ms, p95_ms, cpu_ms, series, size = json.loads(output)
    took = f"p50 {p50_ms:.1f}, p95 {p95_ms:.1f} ms; CPU {cpu_ms:.1f} ms"
    yield f"scrape of /metrics, {FLEET}; {processes}", "under 50 ms", took
    yield "series of a scrape", "under 5,000", f"{series:,}, {size / 1e3:.0f} kB"


def _run(what: str, environment: dict[str, str]) -> str:
    return subprocess.run([*_SITE, what], env=environment, capture_output=True, text=True, check=True).stdout
