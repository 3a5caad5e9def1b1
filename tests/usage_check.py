"""Check of recorded usage against the accounts of jobs."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from scheduler.domain.job_queue import UsageEntry
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
    return usage.entries
