"""Why the pods of a job fit on too few nodes, even if no other job ran."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import SchedulingCycle


def explain_node_misfit(
    cycle: SchedulingCycle, job: Job, usable_gpus: int, numbers: Mapping[str, float]
) -> Reason | None:
    """Return the reason, or None if the pods fit wherever there are GPUs.

    Args:
        usable_gpus: the most GPUs of one model that the job could use if no other job ran.
    """
    if cycle.fit.count_alone(job) is None:
        return None
    if job.awaits_review:
        review = job.placement.review
        if review is None:
            return Reason(ReasonCode.TEMPLATE_NOT_CHECKED, "the API server has not checked its template yet", numbers)
        return Reason(ReasonCode.TEMPLATE_REJECTED, review.error, numbers)
    volumes = job.placement.volumes
    if job.spec.pod_requirements.claims and (volumes is None or volumes.error):
        detail = "its volume claims have not been read yet" if volumes is None else volumes.error
        return Reason(ReasonCode.VOLUME_NOT_READY, detail, numbers)
    needed = gpu_sets.format_gpu_count(job.spec.min_gpus)
    detail = f"needs {needed}; its pods fit on nodes with {usable_gpus}"
    if cause := cycle.fit.explain_infeasibility(job):
        detail = cause if not usable_gpus else f"{detail}: {cause}"
    return Reason(ReasonCode.NO_FEASIBLE_NODE, detail, {**numbers, "feasible_gpus": float(usable_gpus)})
