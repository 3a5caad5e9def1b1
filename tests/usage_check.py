"""Check of recorded usage against the accounts of jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import pytest

from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry
from scheduler.store.allocation_history import SpanQuery
from scheduler.store.api_protocol import ApiStore

JOBS_MAX = 1_000_000


def check_usage(store: ApiStore) -> tuple[UsageEntry, ...]:
    """Assert that usage by queue and owner equals the sum over their live and ended jobs, and return the usage."""
    usage = store.load_usage(from_s=-math.inf, to_s=math.inf)
    held, lost, gpu_s, lost_gpu_s = (defaultdict[tuple[str, str], float](float) for _ in range(4))
    ended = {
        job.id: job for job in store.list_ended_jobs(limit=JOBS_MAX)
    }  # read after the snapshot: jobs that ended meanwhile are live in it
    for job in (ended | dict(usage.snapshot.jobs)).values():
        held[job.spec.queue, job.owner_key] += job.account.gpu_s
        lost[job.spec.queue, job.owner_key] += job.account.lost_gpu_s
    for entry in usage.entries:
        gpu_s[entry.key.queue, entry.key.owner_id] += entry.gpu_s
        lost_gpu_s[entry.key.queue, entry.key.owner_id] += entry.lost_gpu_s
    assert dict(gpu_s) == pytest.approx({key: total for key, total in held.items() if key in gpu_s}, abs=1e-3)
    assert dict(lost_gpu_s) == pytest.approx({key: total for key, total in lost.items() if key in gpu_s}, abs=1e-3)
    assert sum(held.values()) == pytest.approx(sum(gpu_s.values()), abs=1e-3), "usage is missing"
    check_spans(store, {**ended, **usage.snapshot.jobs})
    return usage.entries


def check_spans(store: ApiStore, jobs: Mapping[str, Job]) -> None:
    """Assert that the allocation spans of each job add up to its GPU-seconds, and that open ones are its GPUs."""
    spans = store.allocations.find_spans(SpanQuery(-math.inf, math.inf), before=None, limit=JOBS_MAX)
    gpu_s = dict.fromkeys(jobs, 0.0)
    held: dict[str, dict[str, tuple[int, ...]]] = {job_id: {} for job_id in jobs}
    for span in (stored.span for stored in spans):
        job = jobs[span.job_id]
        end_s = job.account.settled_at_s if span.end_s is None else span.end_s
        assert (span.end is None) == (span.end_s is None)
        gpu_s[job.id] += len(span.gpus) * (end_s - span.begin_s)
        if span.end_s is None:
            assert span.node not in held[job.id], "a job has one open span on a node"
            held[job.id][span.node] = span.gpus
    assert held == {job_id: dict(job.allocation.held) for job_id, job in jobs.items()}
    assert gpu_s == pytest.approx({job_id: job.account.gpu_s for job_id, job in jobs.items()}, abs=1e-3)
