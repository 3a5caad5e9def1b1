"""What two processes counted is put together as prometheus_client does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from scheduler.telemetry.multiprocess_files import MetricFilesCollector, drop_stale_gauges

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
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def counting(folder: Path, count: int) -> Iterator[None]:
    """Another process has counted, and lives on."""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "error", "-c", COUNTS, str(count)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"counted\n"
        yield
        process.communicate()
    assert process.returncode == 0


def shown(folder: Path, collector: type = MetricFilesCollector) -> list[str]:
    registry = CollectorRegistry()
    if collector is MetricFilesCollector:
        registry.register(MetricFilesCollector(str(folder)))
    else:
        MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]  # left untyped there
    return sorted(line for line in generate_latest(registry).decode().splitlines() if line[0] != "#")


def test_it_shows_the_same_samples_as_the_library(tmp_path: Path) -> None:
    with counting(tmp_path, 5), counting(tmp_path, 3):
        told = shown(tmp_path)
        assert told == shown(tmp_path, MultiProcessCollector)
    assert "ebbtide_streams 8.0" in told
    assert 'ebbtide_resize_total{direction="grow",reason="because 2"} 4.0' in told
    assert 'ebbtide_jct_seconds_bucket{le="+Inf"} 8.0' in told


def test_who_begins_takes_the_present_of_the_dead_away_and_leaves_their_counts(tmp_path: Path) -> None:
    with counting(tmp_path, 5):
        pass
    assert "ebbtide_streams 5.0" in shown(tmp_path), "nobody has begun since"
    with counting(tmp_path, 2), counting(tmp_path, 3):
        told = shown(tmp_path)
    assert "ebbtide_streams 5.0" in told, "2 and 3, who are both alive"
    assert "ebbtide_jct_seconds_count 10.0" in told
    assert [line for line in told if 'pending_jobs{queue="lab",reason="4"}' in line] == []


def test_the_gauges_of_one_that_had_this_processs_id_are_those_of_the_dead(tmp_path: Path) -> None:
    own, others = (tmp_path / f"gauge_livesum_{process}.db" for process in (os.getpid(), os.getppid()))
    for each in (own, others):
        each.touch()
    (counts := tmp_path / f"counter_{os.getpid()}.db").touch()
    drop_stale_gauges(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted((others, counts))


def test_a_file_that_vanishes_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "gauge_livesum_1.db").symlink_to(tmp_path / "gone")
    assert shown(tmp_path) == []
