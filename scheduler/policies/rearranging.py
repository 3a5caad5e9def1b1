"""Whether another plan on the same GPUs is worth a reconfiguration."""

from __future__ import annotations

from scheduler.domain.job import MEASURED_S_MIN, Job
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.policies.settings import PolicySettings


def saved_s(job: Job, plan: ParallelPlan, work: float) -> float:
    """Seconds by which `plan` shortens the `work` steps that are left, the reconfiguration not counted.

    The present speed is the measured one: the present plan gains by frozen layers too.
    """
    return work * (job.step_time_s() - plan.iteration_time_s * job.curve_correction)


def ready_s(job: Job, settings: PolicySettings) -> float:
    """The time from which a job whose layers froze may be rearranged: once it has run undisturbed for the resize pause,
    and so long since that its speed with the layers frozen counts as known."""
    return max(job.state_since_s + settings.resize_pause_of(job), job.freezing.at_s + MEASURED_S_MIN)


def pays(job: Job, plan: ParallelPlan, work: float, settings: PolicySettings) -> bool:
    """As for any resize that nobody is forced into: `gain_factor` times the reconfiguration has to be saved."""
    return saved_s(job, plan, work) > settings.gain_factor * settings.reconfiguration_of(job)
