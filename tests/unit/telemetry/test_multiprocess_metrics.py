"""Metrics of several processes: one scrape sums their counters and drops gauges of processes that have exited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from scheduler.telemetry.metrics import render_metrics
from scheduler.telemetry.multiprocess_files import MetricFilesCollector, drop_stale_files

PROGRAM = """
from scheduler.telemetry.metrics import *
import sys
for number in range(int(sys.argv[1])):
    JCT.observe(10.0 ** number)
    RESIZES.labels("grow", f"because {number}").inc(number)
    PENDING_JOBS.labels("lab", str(number)).set(number)
STREAMS.set(float(sys.argv[1]))
print("recorded", flush=True)
sys.stdin.read()
"""


@contextmanager
def recording_process(folder: Path, count: int) -> Iterator[None]:
    """Run a process that has recorded metrics; it lives until the end of the block."""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(count)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"recorded\n"
        yield
        process.communicate()
    assert process.returncode == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path


def exported_lines() -> list[str]:
    return [line for line in render_metrics().body.decode().splitlines() if line[0] != "#"]


def test_scrape_sums_the_processes(folder: Path) -> None:
    with recording_process(folder, 5), recording_process(folder, 3):
        lines = exported_lines()
    assert "ebbtide_streams 8.0" in lines
    assert 'ebbtide_resize_total{direction="grow",reason="because 2"} 4.0' in lines
    assert 'ebbtide_jct_seconds_bucket{le="+Inf"} 8.0' in lines


def test_collector_returns_the_same_samples_as_the_library(tmp_path: Path) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    own.register(MetricFilesCollector(str(tmp_path)))
    MultiProcessCollector(library, str(tmp_path))  # type: ignore[no-untyped-call]  # untyped in the library
    with recording_process(tmp_path, 5), recording_process(tmp_path, 3):
        lines, expected = (generate_latest(each).decode().splitlines() for each in (own, library))
    assert {line for line in lines if line[0] != "#"} == {line for line in expected if line[0] != "#"}


def test_new_process_drops_gauges_of_exited_processes_and_keeps_their_counters(folder: Path) -> None:
    with recording_process(folder, 5):
        pass
    assert "ebbtide_streams 5.0" in exported_lines(), "no process has started since"
    with recording_process(folder, 2), recording_process(folder, 3):
        lines = exported_lines()
    assert "ebbtide_streams 5.0" in lines, "2 and 3 of the live processes"
    assert "ebbtide_jct_seconds_count 10.0" in lines
    assert [line for line in lines if 'pending_jobs{queue="lab",reason="4"}' in line] == []


def test_gauges_of_an_earlier_process_with_the_same_id_are_stale(tmp_path: Path) -> None:
    own, other = (tmp_path / f"gauge_livesum_{process_id}.db" for process_id in (os.getpid(), os.getppid()))
    counter = tmp_path / f"counter_{os.getpid()}.db"
    for path in (own, other, counter):
        path.touch()
    drop_stale_files(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted((other, counter))


def test_gauge_file_that_is_deleted_during_a_scrape_is_skipped(folder: Path) -> None:
    (folder / "gauge_livesum_1.db").symlink_to(folder / "missing")
    assert exported_lines() == []
