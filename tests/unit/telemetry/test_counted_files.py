"""What two processes counted is put together as prometheus_client does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from scheduler.telemetry.counted_files import CountedFiles

COUNTS = """
from scheduler.telemetry.metrics import *
import sys
for number in range(int(sys.argv[1])):
    JCT.observe(10.0 ** number)
    TICK_DURATION.labels("decide").observe(0.01 * number)
    RESIZES.labels("grow", f"because {number}").inc(number)
    PENDING_JOBS.labels("lab", str(number)).set(number)
STREAMS.set(float(sys.argv[1]))
GOODPUT.set(1.0 / float(sys.argv[1]))
"""


def test_it_shows_the_same_samples_as_the_library(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    for count in ("5", "3"):
        subprocess.run([sys.executable, "-W", "error", "-c", COUNTS, count], env=environment, check=True)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(CountedFiles(str(tmp_path)))
    MultiProcessCollector(theirs, str(tmp_path))  # type: ignore[no-untyped-call]  # left untyped there
    told, expected = (
        sorted(line for line in generate_latest(each).decode().splitlines() if line[0] != "#")
        for each in (ours, theirs)
    )
    assert told == expected
    assert "ebbtide_streams 8.0" in told
    assert 'ebbtide_resize_total{direction="grow",reason="because 2"} 4.0' in told
    assert 'ebbtide_jct_seconds_bucket{le="+Inf"} 8.0' in told
