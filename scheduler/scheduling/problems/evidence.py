"""Facts from which problems follow in addition to the snapshot: they are stored elsewhere, or need history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain.events import Webhook
from scheduler.domain.job import Job
from scheduler.domain.machine import Machine
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.problems.job_activity import JobActivity


@dataclass(frozen=True, slots=True)
class GpuTimeUse:
    """GPU-seconds that all jobs held since `since_s`, and those whose work was found lost since then."""

    since_s: float
    gpu_s: float
    lost_gpu_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that `find_problems` reads in addition to the snapshot.

    Args:
        now_s: time of the request, not before that of the snapshot.
        settings: settings of the policy set. `lends`: whether it lends at all.
        has_leader: whether a controller leads.
        failed_jobs: the newest jobs that failed in the last 24 hours.
        activity: disturbances of jobs in the last hour, by job id.
        gpu_time: None if it was not read.
        machines: machines with agents, including revoked ones.
        webhooks: all webhooks, enabled or not.
        down_since_s: when each node went down, by node, as far as events tell.
    """

    now_s: float
    settings: PolicySettings = field(default_factory=PolicySettings)
    lends: bool = True
    has_leader: bool = True
    failed_jobs: tuple[Job, ...] = ()
    activity: Mapping[str, JobActivity] = field(default_factory=dict)
    gpu_time: GpuTimeUse | None = None
    machines: tuple[Machine, ...] = ()
    webhooks: tuple[Webhook, ...] = ()
    down_since_s: Mapping[str, float] = field(default_factory=dict)
