"""What a scrape of /metrics costs, and how many series it has; processes as in `tests.benchmarks.metrics_site`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

from tests.benchmarks.metrics_site import NODES, POOLS, QUEUES, RUNNING, WAITING

_SITE = (sys.executable, "-m", "tests.benchmarks.metrics_site")
FLEET = f"{POOLS} pools, {QUEUES} queues, {NODES:,} nodes, {RUNNING + WAITING:,} jobs"


def rows() -> Iterator[tuple[str, str, str]]:
    """By one process, and by an API that shows what a controller counts too, through files (`ebbtide serve`)."""
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    yield from _rows("one process", _run("both", environment))
    with TemporaryDirectory() as folder:
        environment["PROMETHEUS_MULTIPROC_DIR"] = folder
        command = [*_SITE, "count"]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
            assert controller.stdout is not None
            assert controller.stdout.readline() == b"counted\n"
            yield from _rows("API and controller", _run("ask", environment))
            controller.communicate()


def _rows(who: str, told: str) -> Iterator[tuple[str, str, str]]:
    half_ms, most_ms, used_ms, series, size, ours_ms, theirs_ms = json.loads(told)
    took = f"p50 {half_ms:.1f}, p95 {most_ms:.1f} ms; processor time {used_ms:.1f} ms"
    yield f"/metrics, {FLEET}; {who}", "under 50 ms", took
    yield "its text, processor time", "below prometheus_client's", f"{ours_ms:.1f} against {theirs_ms:.1f} ms"
    yield "its series", "under 5,000", f"{series:,}, {size / 1e3:.0f} kB"


def _run(what: str, environment: dict[str, str]) -> str:
    return subprocess.run([*_SITE, what], env=environment, capture_output=True, text=True, check=True).stdout
