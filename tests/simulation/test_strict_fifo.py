"""The `fifo` policy set in the simulator against an independent reference of a few lines."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import pytest

from scheduler.documents.trace_files import JobRow
from scheduler.simulator.simulate import simulate
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs


def strict_fifo_waits_s(jobs: Iterable[JobRow], gpus: int) -> list[float]:
    """Return waiting times of strict first come, first served: jobs use any free GPUs, and none passes the head."""
    waits: list[float] = []
    ends: list[tuple[float, int]] = []
    free, now_s = gpus, 0.0
    for job in jobs:
        now_s = max(now_s, job.submit_time_s)
        while ends and (ends[0][0] <= now_s or free < job.gpus):
            end_s, returned = heappop(ends)
            now_s, free = max(now_s, end_s), free + returned
        free -= job.gpus
        heappush(ends, (now_s + job.duration_s, job.gpus))
        waits.append(now_s - job.submit_time_s)
    return waits


@pytest.mark.parametrize("seed", [1, 2])
def test_fifo_waits_as_long_as_the_reference(seed: int) -> None:
    jobs = synthetic_jobs(seed, 400, gap_s=300.0, mean_s=1800.0)
    cluster = small_cluster(training=3, inference=1)
    (report,) = simulate(jobs, synthetic_demand(seed, 1, peak_gpus=8), cluster, "fifo", seed=seed).policies
    waits_s = strict_fifo_waits_s(jobs, 24)
    assert sum(waits_s) / len(waits_s) > 300.0, "the trace must queue jobs for a meaningful comparison"
    assert report.queueing_s.mean == pytest.approx(sum(waits_s) / len(waits_s), rel=0.03)
    assert report.completed == len(jobs)


def test_reference_matches_a_case_worked_out_by_hand() -> None:
    jobs = (
        JobRow(2, "a", 0.0, 100.0, 3),
        JobRow(3, "b", 10.0, 50.0, 2),  # waits for a until 100 s
        JobRow(4, "c", 20.0, 10.0, 1),  # fits beside a, but b is first
        JobRow(5, "d", 200.0, 10.0, 4),  # b and c ended earlier
    )
    assert strict_fifo_waits_s(jobs, 4) == [0.0, 90.0, 80.0, 0.0]
