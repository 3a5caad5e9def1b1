"""Minimum run time: how long a job that has started is left alone."""

from __future__ import annotations

from scheduler.domain.job import Job
from scheduler.policies.settings import PolicySettings


def held_until_s(job: Job, settings: PolicySettings) -> float:
    """Until then only a recall, the loss of a node or its owner may preempt this placed job.

    Counted from its first start; for a job that was interrupted since, from its last change of state, because its
    last start is not on record.
    """
    account = job.account
    untouched = account.preemptions == account.failures == 0
    since_s = account.first_started_at_s if untouched else None
    return (job.state_since_s if since_s is None else since_s) + settings.run_time_min_s
