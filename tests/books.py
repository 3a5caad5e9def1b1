"""The books of usage against the accounts of the jobs, in any store at any time."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from scheduler.domain.job_queue import UsageEntry
from scheduler.store.api_protocol import ApiStore

JOBS_MAX = 1_000_000


def check_usage(store: ApiStore) -> tuple[UsageEntry, ...]:
    """Gives the books, once each queue and owner has booked what the accounts of their jobs say, live and ended."""
    books = store.load_usage(from_s=-math.inf, to_s=math.inf)
    held, lost, gpu_s, lost_gpu_s = (defaultdict[tuple[str, str], float](float) for _ in range(4))
    ended = {
        job.id: job for job in store.list_ended_jobs(limit=JOBS_MAX)
    }  # read later: who ended meanwhile was live then
    for job in (ended | dict(books.snapshot.jobs)).values():
        held[job.spec.queue, job.owner] += job.account.gpu_s
        lost[job.spec.queue, job.owner] += job.account.lost_gpu_s
    for entry in books.entries:
        gpu_s[entry.key.queue, entry.key.owner] += entry.gpu_s
        lost_gpu_s[entry.key.queue, entry.key.owner] += entry.lost_gpu_s
    assert dict(gpu_s) == pytest.approx({key: total for key, total in held.items() if key in gpu_s}, abs=1e-3)
    assert dict(lost_gpu_s) == pytest.approx({key: total for key, total in lost.items() if key in gpu_s}, abs=1e-3)
    assert sum(held.values()) == pytest.approx(sum(gpu_s.values()), abs=1e-3), "somebody's usage is not booked"
    return books.entries
